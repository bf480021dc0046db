"""Runs hangs of many kinds, and counts how often the rank that causes one is named: `python -m scripts.hang_grid`.

Each run is a job of its own with groups for data and tensor parallelism (`tests/faults/hang_worker.py`), in which one
rank goes wrong at its fourth step. Its ranks are spread over one or more agents on this machine. The table is that of
docs/hangs.md: named, unknown, and wrong, which must be none. A run is repeated by its number: `--seed 1 --only 17`.

With `--wrapped` the ranks are in an in-process wrapper, and what counts is what their function is told when it is
called again: `CallWrapper.last_interruption`. Where it is not called again, the fault counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests/faults/hang_worker.py"
_LIMIT_S = 4
"""Of a step, which takes milliseconds; more than `SLOW_S` of the worker, and room for a machine that is busy."""
_DEADLINE_S = 180


class Answer(Enum):
    """What is right to say of a kind."""

    RANK = "the rank"
    """It alone; or, where ranks are out of step with each other, it with others, but not with all."""
    NOTHING = "no fault"
    """The job ends well."""


KINDS = {
    "sleeps": Answer.RANK,
    "sleeps outside": Answer.RANK,
    "spins": Answer.RANK,
    "livelock": Answer.RANK,
    "holds the GIL": Answer.RANK,
    "waits for a lock": Answer.RANK,
    "stops": Answer.RANK,
    "dies": Answer.RANK,
    "returns early": Answer.RANK,
    "leaves one out": Answer.RANK,
    "one more": Answer.RANK,
    "another collective": Answer.RANK,
    "another size": Answer.RANK,
    "another order": Answer.RANK,
    "leaves out a send": Answer.RANK,
    "is slow": Answer.NOTHING,
}
_OUT_OF_STEP = (
    "leaves one out",
    "one more",
    "another collective",
    "another size",
    "another order",
    "leaves out a send",
)
"""Kinds in which ranks are out of step with each other, so that several may have to be named."""
_OUTCOMES = ("named", "unknown", "wrong")
"""From the best to the worst. `named` is the right answer, also where that is that nothing is wrong."""


@dataclass(frozen=True)
class Run:
    """One job: `culprit` goes wrong as `kind` says. `by_mesh`: its groups are those of a DeviceMesh."""

    number: int
    kind: str
    ranks: int
    agents: int
    culprit: int
    by_mesh: bool

    def __str__(self) -> str:
        groups = "mesh" if self.by_mesh else "new_group"
        return f"{self.number:4} {self.kind}, rank {self.culprit} of {self.ranks} on {self.agents}, {groups}"


def main() -> int:
    """Prints the table. Returns 1 if a wrong rank was named."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="sizes of the jobs: 4 or more, even")
    words.add_argument("--agents", type=_numbers, default=[1], help="over how many agents, like 1,2,4, in turn")
    words.add_argument("--runs", type=int, default=200, help="how many runs, over all kinds and sizes in turn")
    words.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what goes wrong; default: all")
    words.add_argument("--seed", type=int, default=1, help="chooses ranks that go wrong, and which jobs have a mesh")
    words.add_argument("--only", type=int, nargs="+", help="runs of the plan, by number; default: all")
    words.add_argument("--at-once", type=int, default=1, help="how many jobs run at the same time")
    words.add_argument("--wrapped", action="store_true", help="in an in-process wrapper: what the function is told")
    words.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds that a step may take")
    words.add_argument("--keep", type=Path, help="folder for journals and output of runs without the right answer")
    words.add_argument("--table", type=Path, help="a file for the table, beside the output")
    asked = words.parse_args()
    keep = asked.keep or Path(tempfile.mkdtemp(prefix="hang-grid-"))
    runs = plan(asked.runs, asked.kinds, asked.ranks, asked.agents, asked.seed)
    if asked.only:
        runs = [run for run in runs if run.number in asked.only]
    counts: dict[tuple[str, int], Counter[str]] = {}
    command = f"python -m scripts.hang_grid {_shown(asked)}"
    began = time.monotonic()
    with ThreadPoolExecutor(asked.at_once) as pool:
        try:
            outcomes = pool.map(lambda run: perform(run, asked.limit, keep, asked.wrapped), runs)
            for run, (outcome, text) in zip(runs, outcomes, strict=True):
                counts.setdefault((run.kind, run.agents), Counter())[outcome] += 1
                print(f"{run}: {outcome}: {text}", flush=True)
                if asked.table:  # one that is interrupted leaves what it has
                    asked.table.write_text(table(counts, command))
        finally:
            pool.shutdown(cancel_futures=True)
            total = sum(found.total() for found in counts.values())
            print(f"\n{table(counts, command)}\n{total} of {len(runs)} runs in {time.monotonic() - began:.0f} s")
    return int(any(found["wrong"] for found in counts.values()))


def _shown(asked: argparse.Namespace) -> str:
    """Returns the arguments that say which runs these are, without folders of this machine."""
    words = [f"--seed {asked.seed} --runs {asked.runs} --limit {asked.limit:g} --at-once {asked.at_once}"]
    words.append(f"--ranks {' '.join(map(str, asked.ranks))} --agents {','.join(map(str, asked.agents))}")
    if len(asked.kinds) < len(KINDS):
        words.append(shlex.join(["--kinds", *asked.kinds]))
    if asked.wrapped:
        words.append("--wrapped")
    if asked.only:
        words.append(f"--only {' '.join(map(str, asked.only))}")
    return " ".join(words)


def plan(runs: int, kinds: Sequence[str], ranks: Sequence[int], agents: Sequence[int], seed: int) -> list[Run]:
    """Returns the runs: the kinds in turn, each over all sizes and numbers of agents in turn.

    Each run is drawn by itself, so that it is the same whatever others are asked for.
    """
    places = [(size, nodes) for nodes in agents for size in ranks]
    found = []
    for number in range(runs):
        turn, kind = divmod(number, len(kinds))
        size, nodes = places[(turn + kind) % len(places)]
        draw = random.Random(f"{seed} {number}")
        found.append(Run(number + 1, kinds[kind], size, nodes, draw.randrange(size), draw.random() < 0.5))
    return found


def perform(run: Run, limit_s: float, keep: Path, wrapped: bool = False) -> tuple[str, str]:
    """Runs one job. Returns one of `_OUTCOMES`, and what the launchers said.

    Args:
        limit_s: seconds that a step may take.
        keep: where a copy of the job's folder goes if the answer is not the right one.
        wrapped: its ranks are in an in-process wrapper.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hang-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        how = ["mesh"] * run.by_mesh + [f"wrapped={limit_s}"] * wrapped
        (folder / "hang").write_text(":".join([run.kind, str(run.culprit), *how]))
        codes = _run_job(folder, run, limit_s)
        try:
            lines = [json.loads(line) for file in folder.glob("*/journal.*") for line in file.read_text().splitlines()]
            faults = [line for line in lines if line["event"] == "fault"]
            if wrapped:
                told = [json.loads(file.read_text()) for file in folder.glob("told.*")]
                outcome, text = judged_by_the_told(run, told, faults, codes)
            else:
                outcome, text = judged(run, faults, codes)
        except (OSError, ValueError, KeyError) as error:  # a launcher was killed while it wrote, at the deadline
            outcome, text = "unknown", f"the journals cannot be read ({error!r}), exit codes {codes}"
        if outcome != "named":
            kept = keep / f"run{run.number}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            text += f" [{kept}]"
    return outcome, f"{text} ({time.monotonic() - began:.1f} s)"


def _run_job(folder: Path, run: Run, limit_s: float) -> list[int | None]:
    """Runs the launchers of a job in a folder. Returns their exit codes; None: it had not ended at the deadline."""
    launchers = []
    deadline = time.monotonic() + _DEADLINE_S
    try:
        for number, words in enumerate(_words_of(run)):
            launchers.append(_launcher(folder, number, [*words, f"--ft-rank-section-timeouts=step:{limit_s:g}"]))
        codes: list[int | None] = []
        for launcher in launchers:
            try:
                codes.append(launcher.wait(max(1.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes
    finally:
        for launcher in launchers:
            launcher.kill()  # one that has ended takes no notice
            launcher.wait()


def _words_of(run: Run) -> list[list[str]]:
    """Returns the words for each launcher of a job whose ranks are spread evenly, each with a journal of its own."""
    if run.agents == 1:
        return [[f"--nproc-per-node={run.ranks}", "--ft-journal-dir=agent0"]]
    # All that may come are there, so nobody waits for the last call; a busy machine may start them seconds apart.
    conf = "join_timeout=60,last_call_timeout=5,is_host="
    shared = [
        f"--nproc-per-node={run.ranks // run.agents}",
        f"--nnodes={run.agents}",
        "--rdzv-backend=c10d",
        "--rdzv-id=hang",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    return [
        [*shared, f"--rdzv-conf={conf}{int(number == 0)}", f"--ft-journal-dir=agent{number}"]
        for number in range(run.agents)
    ]


def _launcher(folder: Path, number: int, words: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"output{number}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ft_launcher", *words, "--max-restarts=0", str(WORKER), str(folder)],
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def judged(run: Run, faults: Sequence[Mapping[str, Any]], codes: Sequence[int | None]) -> tuple[str, str]:
    """Whether the launchers said the right thing, and what they said.

    Of several nodes one tells the fault; if another told one as well, the worst counts.
    """
    text = " | ".join(f"rank {fault['rank']} {fault['what']}; {fault['hint']}" for fault in faults)
    if None in codes:
        return "unknown", f"the job did not end within {_DEADLINE_S} s; {text}"
    if KINDS[run.kind] is Answer.NOTHING:
        outcome = "wrong" if faults or any(codes) else "named"
        return outcome, text or f"no fault, exit codes {codes}"
    if not faults:
        return "unknown", f"no fault, exit codes {codes}"
    return max((_of_fault(fault, run) for fault in faults), key=_OUTCOMES.index), text


def judged_by_the_told(
    run: Run, told: Sequence[Mapping[str, Any]], faults: Sequence[Mapping[str, Any]], codes: Sequence[int | None]
) -> tuple[str, str]:
    """Whether each rank that was called again was told the right thing, and what they were told; the worst counts.

    None is where the only rank of a node is gone: the job ends then, and its fault counts.
    """
    text = " | ".join(sorted({f"{one['ranks']} {one['finding']}: {one['text']}" for one in told}))
    if None in codes:
        return "unknown", f"the job did not end within {_DEADLINE_S} s; {text}"
    if KINDS[run.kind] is Answer.NOTHING:
        outcome = "wrong" if told or any(codes) else "named"
        return outcome, text or f"not called again, exit codes {codes}"
    if not told:
        return judged(run, faults, codes)
    return max((_of_told(one, run) for one in told), key=_OUTCOMES.index), f"{text}, exit codes {codes}"


def _of_told(told: Mapping[str, Any], run: Run) -> str:
    """As `_of_fault`."""
    if not told["ranks"]:
        return "unknown"
    if set(told["ranks"]) == {run.culprit}:
        return "named"
    return _of_several(told["ranks"], told["finding"], run)


def _of_fault(fault: Mapping[str, Any], run: Run) -> str:
    """Whether a fault names the culprit: alone, or as one side of a mismatch or a deadlock where ranks are out of step.
    Where it names all ranks of the job, it leaves open which one it is.

    A rank without a finding is told of because of itself, for instance since its own limit passed outside of any
    collective; but not one that only reports that it lost another.
    """
    is_silent = not fault["finding"] and fault["collateral"]
    if fault["finding"] in ("unknown", "transport") or is_silent:
        return "unknown"
    blamed = [rank for rank in fault["blamed"] if isinstance(rank, int)]
    if run.culprit in (fault["rank"], *blamed) and set(blamed) <= {run.culprit}:
        return "named"
    return _of_several(blamed, fault["finding"], run)


def _of_several(blamed: Sequence[int], finding: str, run: Run) -> str:
    """Whether ranks that are not the culprit alone are the right answer."""
    may_be_several = run.kind in _OUT_OF_STEP and finding in ("mismatch", "deadlock")
    if not may_be_several or run.culprit not in blamed:
        return "wrong"
    if len(set(blamed)) < run.ranks:
        return "named"
    return "unknown"


def table(counts: Mapping[tuple[str, int], Counter[str]], command: str) -> str:
    """Returns the table in Markdown: a line for each kind, with how many were named by the number of agents."""
    kinds = [kind for kind in KINDS if any(name == kind for name, _ in counts)]
    agents = sorted({number for _, number in counts})
    head = ["what goes wrong", "right", "runs", *_OUTCOMES, *(f"named on {number}" for number in agents)]
    rows = [head, ["---"] * len(head)]
    for kind in kinds:
        rows.append(
            [kind, KINDS[kind].value, *_cells({number: counts.get((kind, number), Counter()) for number in agents})]
        )
    by_agents = {
        number: sum((counts.get((kind, number), Counter()) for kind in kinds), Counter[str]()) for number in agents
    }
    rows.append(["all", "", *_cells(by_agents)])
    return f"`{command}`:\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(found: Mapping[int, Counter[str]]) -> list[str]:
    total = sum(found.values(), Counter[str]())
    return [
        str(total.total()),
        *(str(total[outcome]) for outcome in _OUTCOMES),
        *(f"{one['named']}/{one.total()}" for one in found.values()),
    ]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
