"""What a rank can do wrong: the job restarts and ends as if nothing had happened, or ends with a code that says why."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import GIVE_UP, Told, holds
from tests.faults.training import Plan, PlannedFault

RANKS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
RANKS_OF_HANGS = [pytest.param(1, marks=pytest.mark.slow), *RANKS[1:]]  # with two, the one that hangs has a neighbour


@dataclass(frozen=True)
class Cell:
    """A fault, how it should be told, and the launcher's exit code when no restart is left.

    It happens to the last rank, or to every one, in an iteration. `limit`: the limit it passes, which `flags` sets.
    """

    what: str
    where: str
    kind: str
    code: int
    limit: str = ""
    flags: tuple[str, ...] = ()
    every_rank: bool = False
    name: str = ""
    iteration: int = 4

    def __str__(self) -> str:
        return self.name or f"{self.what} in {self.where}"

    def plan(self, nproc: int) -> Plan:
        return Plan((self.fault(nproc),))

    def fault(self, nproc: int) -> PlannedFault:
        return PlannedFault(self.what, self.where, self.iteration, None if self.every_rank else nproc - 1)

    def told(self, nproc: int, action: str = "restart") -> Told:
        return Told(self.kind, range(nproc) if self.every_rank else {nproc - 1}, self.limit, action)


def hang(what: str, where: str, limit: str, *flags: str, name: str = "") -> Cell:
    iteration = 5 if where == "checkpointing" else 4
    return Cell(what, where, "hang", 85, limit, flags, name=name, iteration=iteration)


DEATHS = [
    Cell("SIGSEGV", "setup", "signal", 139),
    Cell("exception", "step", "exception", 1, iteration=1),
    Cell("exit 3", "between", "exit", 3, iteration=4),
    Cell("exception", "checkpointing", "exception", 1, iteration=5),
    Cell("SIGKILL", "step", "signal", 137, iteration=7),
]
"""One rank ends, each farther on than the one before."""
ALL_DIE = Cell("SIGABRT", "step", "signal", 134, every_rank=True)
HANGS = [
    hang("SIGSTOP", "step", "section:step", "--ft-rank-section-timeouts", "step:1,checkpointing:30"),
    hang("wait with the GIL", "checkpointing", "section:checkpointing", "--ft-rank-section-timeouts=checkpointing:1"),
    hang("sleep", "setup", "section:setup", "--ft_rank_section_timeouts=setup:1,step:30"),
    hang("sleep", "between", "subsequent", "--ft-rank-heartbeat-timeout=1", name="heartbeat missing"),
    hang("outer overdue", "between", "section:outer", "--ft-rank-section-timeouts=outer:1,inner:30"),
    hang("inner overdue", "between", "section:inner", "--ft-rank-section-timeouts=outer:30,inner:1"),
    hang("sleep", "start", "connect", "--ft-connect-timeout=3", name="never connects"),
    hang("sleep", "end", "teardown", "--ft-teardown-timeout=1", name="hang after the shutdown of the watch"),
]
ONE_PER_CODE = list({cell.code: cell for cell in reversed([*DEATHS, ALL_DIE, *HANGS])}.values())


@pytest.mark.parametrize("nproc", RANKS)
def test_recovers_from_one_death_after_the_other(start_job: StartJob, nproc: int) -> None:
    plan = Plan(tuple(cell.fault(nproc) for cell in DEATHS))
    holds(start_job(plan, nproc, "--max-restarts=5"), 0, [cell.told(nproc) for cell in DEATHS])


@pytest.mark.parametrize("nproc", RANKS)
def test_recovers_from_the_death_of_all(start_job: StartJob, nproc: int) -> None:
    holds(start_job(ALL_DIE.plan(nproc), nproc, "--max-restarts=1"), 0, [ALL_DIE.told(nproc)])


@pytest.mark.parametrize("nproc", RANKS_OF_HANGS)
@pytest.mark.parametrize("cell", HANGS, ids=str)
def test_recovers_from_a_hang(start_job: StartJob, cell: Cell, nproc: int) -> None:
    job = start_job(cell.plan(nproc), nproc, "--max-restarts=1", *cell.flags)
    holds(job, 0, [cell.told(nproc)])


@pytest.mark.parametrize("nproc", RANKS[1:])
@pytest.mark.parametrize("cell", ONE_PER_CODE, ids=str)
def test_ends_with_its_code_when_no_restart_is_allowed(start_job: StartJob, cell: Cell, nproc: int) -> None:
    job = start_job(cell.plan(nproc), nproc, "--max-restarts=0", *cell.flags)
    holds(job, cell.code, [cell.told(nproc, GIVE_UP)])


def test_ends_with_its_code_when_all_restarts_are_spent(start_job: StartJob) -> None:
    plan = Plan((PlannedFault("SIGKILL", "step", 4, rank=1), PlannedFault("exit 3", "step", 4, rank=1)))
    holds(start_job(plan, 2, "--max-restarts=1"), 3, [Told("signal", {1}), Told("exit", {1}, action=GIVE_UP)])
