"""Journals of a long job of many nodes: `python -m scripts.bench.long_journals FOLDER [--nodes N --cycles N --days N]`.

Writes one for each node, as the launchers of a job do whose cycles all end by a fault but the last. What its ranks
did is made up; what the launcher makes of it is found, decided and put into lines by the launcher's own parts. The
nodes see the same, each by a clock of its own. `report_of_journals.py` measures a report on them.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft_client.rank.monitoring.learned_limits import LearnedLimits
from ft_launcher.agent.times import WRITE_EVERY_S
from ft_launcher.decide.attribution import Fault, FaultKind, NodeEvidence, RankEvidence, all_nodes
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence, to_record
from ft_launcher.decide.attribution.first_failure import find_fault
from ft_launcher.decide.policy.case import Case, FaultReport, NodeViews, Policy
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.job_policy import JobPolicy
from ft_launcher.decide.policy.restart_policy import Decision
from ft_launcher.record import events
from ft_launcher.record.console import console_text
from ft_launcher.record.journal.journal import as_line
from ft_launcher.record.ledger.account import Category, part_as_json
from ft_launcher.record.ledger.job_ledger import JobLedger
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import MonitorSettings, RestartSettings
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import NO_ITERATION, RankException
from rank_monitor.contract.wire.rank_times import STEP, Durations, Outside, RankTimes

RANKS = 8
"""Of each node."""
_WALL_S, _BOOT_S = 1_750_000_000.0, 5_000.0
"""When the job begins: since 1970, and since its nodes started."""
_CLOCKS_S = 0.2
"""By how much clocks of nodes, and the starts of their launchers, differ."""
_MAX_RESTARTS = 10

_HEALTH_S, _RENDEZVOUS_S, _LAUNCH_S, _STOP_S = 0.8, 1.3, 0.4, 2.1
_START_S, _SETUP_S, _LOAD_S, _FIRST_STEP_S = 6.2, 14.7, 31.4, 48.6
"""From the start of a rank to its first message, then without a step, in that the load of a checkpoint."""
_STEP_S, _DATA_S, _SAVE_S, _STEPS_A_SAVE = 10.037412907, 0.183220641, 21.390517, 100
_HANG_S = 600.0
"""The limit of section `step`."""
_SETTINGS = MonitorSettings(rank_section_timeouts={STEP: _HANG_S})
_LIMITS = LearnedLimits.configured(_SETTINGS).adopting({"section:checkpoint": 312.0}).message()
"""What each rank says of its limits at its start."""
_SPREAD = ((0.6, 1.0), (0.3, 1.2), (0.08, 0.8), (0.019, 1.7), (0.001, 2.3))
"""Which share of the steps takes how many times as long."""

_KINDS = (FaultKind.HANG, FaultKind.EXCEPTION, FaultKind.SIGNAL)
_CALLED_BY = [f"model/layer_{number}.py:{100 + number} in forward" for number in range(6)]
_WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", *_CALLED_BY, "train.py:41 in <module>"]
_LOADS = ["data/stream.py:210 in read", *_CALLED_BY, "train.py:38 in <module>"]
_ERROR = "CUDA error: an illegal memory access was encountered"
_TRACEBACK = "".join(
    f'  File "/app/model/layer_{number}.py", line {100 + number}, in forward\n    x = self.layer(x)\n'
    for number in range(6)
)
_MOMENT = re.compile(r'"(t|since|until)": ([\d.]+)')


@dataclass(frozen=True)
class Job:
    """How large the job is."""

    nodes: int = 256
    cycles: int = 150
    days: float = 30.0


@dataclass
class Cycle:
    """One cycle, as all nodes see it. Moments are monotonic seconds.

    Attributes:
        progress: the last sign of progress; before the end of a hang its limit.
        reached: the last iteration.
        kind, culprit: how it failed, and by which rank; None: it succeeded.
        ledgers: the lines of the event `ledger`.
    """

    number: int
    began: float
    progress: float
    over: float
    kind: FaultKind | None
    culprit: int
    reached: int = NO_ITERATION
    ledgers: list[str] = field(default_factory=list)
    fault: Fault | None = None
    headline: str = ""
    decision: Decision | None = None
    inputs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Story:
    """A whole job: its cycles, and the last event `ledger`, which is of the time after them."""

    job: Job
    cycles: list[Cycle]
    rest: events.LedgerEvent


def simulate(job: Job) -> Story:
    """Returns what happened in a job; each time the same."""
    draw = random.Random(job.cycles)
    ledger = JobLedger(_BOOT_S, _WALL_S)
    cycles: list[Cycle] = []
    policy, history = JobPolicy(RestartSettings(), _MAX_RESTARTS), History()
    now, resumed = _BOOT_S, NO_ITERATION
    for number in range(job.cycles):
        now = _form(ledger, now)
        over = now + job.days * 86400 / job.cycles * draw.uniform(0.7, 1.3)
        kind = None
        if number < job.cycles - 1:
            kind = _KINDS[number % len(_KINDS)]
        progress = over
        if kind is FaultKind.HANG:
            progress = max(now, over - _HANG_S)
        cycle = Cycle(number, now, progress, over, kind, draw.randrange(job.nodes * RANKS))
        resumed = _run(ledger, cycle, resumed)
        if kind is not None:
            history = _judge(job, cycle, policy, history)
        cycles.append(cycle)
        now = over + _STOP_S
    rest = events.LedgerEvent(has_ended=True, **part_as_json(ledger.present(now), ledger.account(now)))
    return Story(job, cycles, rest)


def _form(ledger: JobLedger, now: float) -> float:
    """Forms a cycle; returns when its ranks run."""
    for category, length_s in (
        (Category.HEALTH, _HEALTH_S),
        (Category.RENDEZVOUS, _RENDEZVOUS_S),
        (Category.LAUNCH, _LAUNCH_S),
    ):
        ledger.begins(category, now)
        now += length_s
    return now


def _run(ledger: JobLedger, cycle: Cycle, resumed: int) -> int:
    """Runs a cycle, with a line each ten minutes and at its end; returns at which iteration the next one resumes."""
    ledger.ranks_started(cycle.number, cycle.began)
    now = cycle.began + WRITE_EVERY_S
    while now < cycle.over:
        ledger.rank_times(cycle.number, _rank_times(cycle.began, min(now, cycle.progress), now, resumed))
        present = part_as_json(ledger.present(now), ledger.account(now))
        cycle.ledgers.append(_line(events.LedgerEvent(has_ended=False, **present), now))
        now += WRITE_EVERY_S
    times = _rank_times(cycle.began, cycle.progress, cycle.over, resumed)
    ledger.rank_times(cycle.number, times)
    ledger.cycle_over(cycle.over)
    if cycle.kind is not None:
        ledger.failed(cycle.progress)
    now = cycle.over + _STOP_S
    ledger.stopped(now)
    assert ledger.last is not None
    last = part_as_json(ledger.last, ledger.account(now))
    cycle.ledgers.append(_line(events.LedgerEvent(has_ended=True, **last), now))
    cycle.reached = times.iteration
    return max(times.saved, resumed)


def _rank_times(began: float, progress: float, now: float, resumed: int) -> RankTimes:
    """The ledger of a rank whose process was started at `began`; `resumed`: the iteration that was complete then."""
    since = began + _START_S
    steps, saves = _done(progress - since)
    times = RankTimes(since_ns=_ns(since), at_ns=_ns(max(since, progress)), now_ns=_ns(max(since, now)), attached=True)
    times.tail, times.tail_is_section = STEP, True
    times.step = _durations(steps, _STEP_S, _FIRST_STEP_S)
    times.sections = {
        "data": _durations(steps, _DATA_S, _DATA_S),
        "checkpoint": _durations(saves, _SAVE_S, _SAVE_S),
        "checkpoint_load": _durations(min(steps, 1), _LOAD_S, _LOAD_S),
    }
    for section in times.sections.values():
        section.exclusive_ns = section.whole_ns
    times.outside = {Outside.PREPARING.value: min(_ns(_SETUP_S), times.at_ns - times.since_ns)}
    times.step.exclusive_ns = max(0, times.at_ns - times.since_ns - times.known_ns)
    times.resumed = resumed
    if steps:
        times.iteration = resumed + steps
        times.first_step_ns = _ns(_FIRST_STEP_S)
        times.first_done_ns = _ns(since + _SETUP_S + _LOAD_S + _FIRST_STEP_S)
        times.points = [(resumed, 0)]
        times.points += [(resumed + count, _steps_ns(count)) for count in range(1, steps + 1, 1 + steps // 255)]
    if saves:
        times.saved = resumed + 1 + saves * _STEPS_A_SAVE
        times.saved_ns = _steps_ns(1 + saves * _STEPS_A_SAVE)
    return times


def _done(since_start_s: float) -> tuple[int, int]:
    """How many steps and saves are done so many seconds after the first message of a rank."""
    left_s = since_start_s - _SETUP_S - _LOAD_S - _FIRST_STEP_S
    if left_s < 0:
        return 0, 0
    saves, since_save_s = divmod(left_s, _STEPS_A_SAVE * _STEP_S + _SAVE_S)
    return 1 + int(saves) * _STEPS_A_SAVE + min(_STEPS_A_SAVE, int(since_save_s / _STEP_S)), int(saves)


def _steps_ns(count: int) -> int:
    return _ns(_FIRST_STEP_S + (count - 1) * _STEP_S)


def _durations(count: int, usual_s: float, first_s: float) -> Durations:
    found = Durations()
    if count:
        found.add(_ns(first_s))
    left = count - 1
    for share, factor in reversed(_SPREAD[1:]):
        found.add(_ns(usual_s * factor), int((count - 1) * share))
        left -= int((count - 1) * share)
    if left > 0:
        found.add(_ns(usual_s), left)
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _judge(job: Job, cycle: Cycle, policy: Policy, history: History) -> History:
    """Finds the fault of a cycle and what follows, as its node and the coordinator do; returns the history after it."""
    node = cycle.culprit // RANKS
    fault = find_fault(_evidence(cycle, node), _raise)
    assert fault is not None
    life = CycleLife(cycle.over - cycle.began, cycle.reached)
    report = FaultReport(fault, life, console_text.headline(fault, _name(node)))
    views = NodeViews()
    if cycle.kind is FaultKind.HANG:
        seen = {_name(other): _views(cycle, other) for other in range(job.nodes)}
        views = NodeViews(seen, {name: name for name in seen}, is_complete=True)
    told = policy(Case(report, history.to_record(cycle.over), 0.0, False, views=views), cycle.over)
    judgement = told.judgement
    assert judgement is not None
    if judgement.culprit is not None:
        fault = replace(judgement.culprit.fault, local_rank=fault.local_rank, pid=fault.pid)
    cycle.fault = fault
    cycle.headline = judgement.headline
    cycle.decision = judgement.decision
    cycle.inputs = judgement.inputs
    return History.from_record(told.history, cycle.over)


def _views(cycle: Cycle, node: int) -> list[Any]:
    """What a node tells the coordinator of its ranks at a hang."""
    found: list[Any] = all_nodes.to_record(_evidence(cycle, node).ranks, cycle.over, True, None)["ranks"]
    return found


def _raise(error: Exception) -> None:
    raise error


def _evidence(cycle: Cycle, node: int) -> CycleEvidence:
    """What a node knows of its ranks after a failed cycle."""
    first = node * RANKS
    ranks = [_of_rank(cycle, rank) for rank in range(first, first + RANKS)]
    return CycleEvidence(ranks, NodeEvidence(0, 540_000_000_000), cycle.over, all_ranks=False)


def _of_rank(cycle: Cycle, rank: int) -> RankEvidence:
    is_culprit, age_s = rank == cycle.culprit, cycle.over - cycle.progress + 0.021659492
    snapshot = Snapshot(13, not is_culprit, not is_culprit, cycle.reached, {STEP: age_s}, age_s)
    if cycle.kind is FaultKind.HANG:
        snapshot = replace(
            snapshot, frames=_WAITS, process=_process("futex_do_wait"), groups=_groups(cycle, is_culprit)
        )
    found = RankEvidence(rank, rank % RANKS, _pid(cycle, rank), -signal.SIGTERM, cycle.over + 1.3, snapshot=snapshot)
    if not is_culprit:
        return found
    match cycle.kind:
        case FaultKind.HANG:
            verdict = _verdict(cycle)
            return replace(found, exit_code=-signal.SIGKILL, verdict=verdict, verdict_at=cycle.over)
        case FaultKind.EXCEPTION:
            exception = _exception(cycle)
            return replace(found, exit_code=1, died_at=cycle.over, exception=exception, exception_at=cycle.over)
    return replace(found, exit_code=-signal.SIGSEGV, died_at=cycle.over)


def _verdict(cycle: Cycle) -> Verdict:
    waited_s = cycle.over - cycle.progress
    return Verdict(
        cycle=cycle.number,
        rank=cycle.culprit,
        pid=_pid(cycle, cycle.culprit),
        limit=f"section:{STEP}",
        limit_s=_HANG_S,
        waited_s=waited_s,
        learned=False,
        iteration=cycle.reached,
        sections={STEP: waited_s},
        reason=f"section 'step' open for {waited_s:.2f} s; the limit is 600 s (rank_section_timeouts)",
        line=f"Section 'step' has been open for {waited_s:.2f} seconds. Timeout is 600.00 seconds.",
        frames=_LOADS,
        process=_process("nfs_wait_bit_killable"),
        condemned=True,
    )


def _exception(cycle: Cycle) -> RankException:
    text = f"Traceback (most recent call last):\n{_TRACEBACK}RuntimeError: {_ERROR}\n"
    return RankException("RuntimeError", _ERROR, text, cycle.over - _BOOT_S + _WALL_S)


def _process(waits_in: str) -> dict[str, Any]:
    """What /proc says of a rank."""
    stack = [f"{name}+0x46/0x90" for name in (waits_in, "do_futex", "do_syscall_64", "entry_SYSCALL_64_after_hwframe")]
    return {"state": "S (sleeping)", "stopped": False, "threads": 114, "wchan": waits_in, "kernel_stack": stack}


def _groups(cycle: Cycle, is_culprit: bool) -> dict[str, Any]:
    """How far a rank is in its process group, by the flight recorder."""
    entered = finished = cycle.reached + 1
    if not is_culprit:
        entered += 1
    state = {"entered": entered, "started": 0, "finished": finished, "operation": "all_reduce"}
    return {"0": state | {"shape": "[[4096, 4096]] ['BFloat16']", "description": "default_pg", "members": []}}


def _pid(cycle: Cycle, rank: int) -> int:
    return 10_000 + 10 * cycle.number + rank % RANKS


def _line(event: events.Event, now: float) -> str:
    """The line of an event by the clock of the first node; `now`: monotonic seconds."""
    return as_line(event, now - _BOOT_S + _WALL_S)


def journal(story: Story, node: int) -> Iterator[str]:
    """Yields the lines of a node."""
    late_s = random.Random(node).uniform(0.0, _CLOCKS_S)
    for line in _by_first_clock(story, node):
        # The parts of a job's time begin and end by the clock of the node, too.
        yield _MOMENT.sub(lambda found: f'"{found[1]}": {round(float(found[2]) + late_s, 6)}', line, count=3) + "\n"


def _by_first_clock(story: Story, node: int) -> Iterator[str]:
    job, name = story.job, _name(node)
    limits = {name: getattr(_LIMITS, name) for name in ("initial", "subsequent", "out_of_section")}
    limits |= {"sections": _SETTINGS.rank_section_timeouts, "log": None}
    command = ["/usr/bin/python3", "-u", "train.py", "--config", "large.yaml"]
    versions = {"launcher": "0.1.0", "torch": "2.9.0", "numpy": "2.3.4", "python": "3.12.3", "system": "Linux 6.8.0"}
    yield _line(events.JobStartEvent("long", name, command, _MAX_RESTARTS, RANKS, limits, versions, {}), _BOOT_S)
    for cycle in story.cycles:
        yield from _started(job, cycle, node)
        *while_it_ran, at_its_end = cycle.ledgers
        yield from while_it_ran
        if cycle.kind is not None:
            yield from _failed(cycle, node, at_its_end)
        else:
            for rank in _ranks(node):
                yield _line(events.RankExitEvent(cycle.number, rank, 0), cycle.over)
            yield _line(events.CycleEndEvent(cycle.number, "succeeded"), cycle.over)
            yield at_its_end
    rest, end = story.rest, story.rest.until - _WALL_S + _BOOT_S
    yield _line(rest, end)
    account = {"seconds": rest.total, "goodput": rest.goodput, "goodput_saved": rest.goodput_saved}
    wall_s = round(rest.until - _WALL_S, 6)
    yield _line(events.JobEndEvent(0, "all ranks succeeded", 0, 0, 0, wall_s=wall_s, **account), end)


def _started(job: Job, cycle: Cycle, node: int) -> Iterator[str]:
    ranks = [{"rank": rank, "local_rank": rank % RANKS, "pid": _pid(cycle, rank)} for rank in _ranks(node)]
    master = f"node000:{29_500 + cycle.number}"
    yield _line(events.CycleStartEvent(cycle.number, node, job.nodes, master, ranks), cycle.began)
    for rank in _ranks(node):
        yield _line(events.LimitsEvent.of(_LIMITS, cycle=cycle.number, rank=rank), cycle.began + _START_S)


def _failed(cycle: Cycle, node: int, ledger: str) -> Iterator[str]:
    """The end of a failed cycle; on the node of the rank that failed with the fault and the decision."""
    assert cycle.fault is not None and cycle.decision is not None
    is_culprit = node == cycle.culprit // RANKS
    evidence = _evidence(cycle, node)
    stopped = cycle.over + _STOP_S
    if is_culprit:
        yield from _death(cycle, evidence.ranks[cycle.culprit % RANKS])
    if cycle.kind is FaultKind.HANG:
        seen = [
            {"rank": rank.rank, "place": rank.scene.activity.name.lower(), "frames": list(rank.scene.frames)}
            | {"process": rank.scene.process, "stacks": f"logs/cycle_{cycle.number}/{rank.local_rank}/stacks.txt"}
            | {"groups": rank.groups}
            for rank in evidence.ranks
        ]
        yield _line(events.StacksEvent(cycle.number, seen), stopped)
    if is_culprit or cycle.kind is FaultKind.HANG:
        yield _line(events.EvidenceEvent(cycle.number, None, **to_record(evidence)), stopped)
    yield ledger
    if is_culprit:
        life = CycleLife(cycle.over - cycle.began, cycle.reached)
        yield _line(events.FaultEvent.of(cycle.fault, cycle=cycle.number), stopped)
        yield _line(events.DecisionEvent.of(cycle.decision, cycle=cycle.number, inputs=cycle.inputs), stopped)
        yield _line(events.CycleEndEvent.of(life, cycle=cycle.number, how="failed"), stopped)
        return
    next_step = console_text.next_step(cycle.decision)
    yield _line(events.CycleEndEvent(cycle.number, "failed elsewhere", why=cycle.headline, next=next_step), stopped)


def _death(cycle: Cycle, rank: RankEvidence) -> Iterator[str]:
    if rank.exception is not None:
        event = events.UncaughtExceptionEvent.of(rank.exception, cycle=cycle.number, rank=rank.rank)
        yield _line(event, cycle.over)
    if rank.verdict is not None:
        stacks = f"logs/cycle_{cycle.number}/{rank.local_rank}/stacks.txt"
        yield _line(events.VerdictEvent.of(rank.verdict, stacks=stacks), cycle.over)
    assert rank.exit_code is not None
    yield _line(events.RankExitEvent(cycle.number, rank.rank, rank.exit_code), cycle.over)


def _name(node: int) -> str:
    return f"node{node:03}"


def _ranks(node: int) -> range:
    return range(node * RANKS, (node + 1) * RANKS)


def write(folder: Path, job: Job) -> None:
    """Writes the journals of all nodes into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    story = simulate(job)
    for node in range(job.nodes):
        with (folder / f"journal.{_name(node)}.jsonl").open("w") as file:
            file.writelines(journal(story, node))


def main() -> None:
    """Writes what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.long_journals", description="Writes long journals.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=Job.nodes)
    parser.add_argument("--cycles", type=int, default=Job.cycles)
    parser.add_argument("--days", type=float, default=Job.days)
    options = parser.parse_args()
    write(options.folder, Job(options.nodes, options.cycles, options.days))


if __name__ == "__main__":
    main()
