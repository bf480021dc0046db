"""Runs hangs of many kinds, and counts how often the rank that causes one is named: `python -m scripts.hang_grid`.

Each run is a job of its own with groups for data and tensor parallelism (`tests/faults/hang_worker.py`), in which one
rank goes wrong at its fourth step. Its ranks are spread over one or more agents on this machine. The table is that of
docs/hangs.md: named, unknown, and wrong, which must be none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from scripts.bench.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests/faults/hang_worker.py"
KINDS = (
    "sleeps",
    "sleeps outside",
    "spins",
    "holds the GIL",
    "stops",
    "leaves one out",
    "one more",
    "another collective",
    "another order",
)
_LIMIT_S = 6
_DEADLINE_S = 180


def main() -> int:
    """Prints the table. Returns 1 if a wrong rank was named."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="sizes of the jobs: 4 or more, even")
    words.add_argument("--agents", type=_numbers, default=[1], help="over how many agents, like 1,2,4, in turn")
    words.add_argument("--runs", type=int, default=200, help="how many runs, over all kinds and sizes in turn")
    words.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what goes wrong; default: all")
    words.add_argument("--seed", type=int, default=1, help="chooses the ranks that go wrong")
    asked = words.parse_args()
    choose = random.Random(asked.seed)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in asked.kinds}
    grid = itertools.cycle(itertools.product(asked.ranks, asked.agents, asked.kinds))
    for number, (ranks, agents, kind) in zip(range(asked.runs), grid, strict=False):
        culprit = choose.randrange(ranks)
        outcome, text = run(kind, ranks, agents, culprit)
        counts[kind][outcome] += 1
        print(f"{number + 1:4} {kind}, rank {culprit} of {ranks} on {agents}: {outcome}: {text}", flush=True)
    print("\n| what goes wrong | runs | named | unknown | wrong |\n|---|---|---|---|---|")
    for kind, found in counts.items():
        print(f"| {kind} | {found.total()} | {found['named']} | {found['unknown']} | {found['wrong']} |")
    total = sum(counts.values(), Counter[str]())
    print(f"| all | {total.total()} | {total['named']} | {total['unknown']} | {total['wrong']} |")
    return int(total["wrong"] > 0)


def run(kind: str, ranks: int, agents: int, culprit: int) -> tuple[str, str]:
    """Runs one job. Returns `named`, `unknown` or `wrong`, and what the launchers said."""
    with tempfile.TemporaryDirectory(prefix="hang-") as name:
        folder = Path(name)
        (folder / "hang").write_text(f"{kind}:{culprit}")
        launchers = [_launcher(folder, words) for words in _words_of(ranks, agents)]
        try:
            for launcher in launchers:
                launcher.wait(_DEADLINE_S)
        finally:
            for launcher in launchers:
                launcher.kill()  # one that has ended takes no notice
                launcher.wait()
        lines = [json.loads(line) for file in folder.glob("*/journal.*") for line in file.read_text().splitlines()]
    faults = [line for line in lines if line["event"] == "fault"]
    if not faults:
        return "unknown", "no fault: the job did not hang"
    # Of several nodes one tells the fault; if another told one as well, the worst counts.
    outcome = min((judged(fault, culprit) for fault in faults), key=("wrong", "unknown", "named").index)
    return outcome, " | ".join(f"rank {fault['rank']} {fault['what']}; {fault['hint']}" for fault in faults)


def _words_of(ranks: int, agents: int) -> list[list[str]]:
    """Returns the words for each launcher of a job whose ranks are spread evenly, each with a journal of its own."""
    if agents == 1:
        return [[f"--nproc-per-node={ranks}", "--ft-journal-dir=agent0"]]
    # All that may come are there, so nobody waits for the last call; a busy machine may start them seconds apart.
    conf = "join_timeout=60,last_call_timeout=5,is_host="
    shared = [
        f"--nproc-per-node={ranks // agents}",
        f"--nnodes={agents}",
        "--rdzv-backend=c10d",
        "--rdzv-id=hang",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    return [
        [*shared, f"--rdzv-conf={conf}{int(number == 0)}", f"--ft-journal-dir=agent{number}"]
        for number in range(agents)
    ]


def _launcher(folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    flags = ("--max-restarts=0", f"--ft-rank-section-timeouts=step:{_LIMIT_S}")
    return subprocess.Popen(
        [sys.executable, "-m", "ft_launcher", *words, *flags, str(WORKER), str(folder)],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def judged(fault: dict[str, object], culprit: int) -> str:
    """Whether a fault names the culprit: alone, or as one side of a mismatch or a deadlock, which has no single one.

    A rank without a finding is told of because its own limit passed outside of any collective.
    """
    if fault["finding"] in ("unknown", "transport"):
        return "unknown"
    blamed = _ranks_in(fault["blamed"])
    several = fault["finding"] in ("mismatch", "deadlock")
    if culprit in (fault["rank"], *blamed) and (several or set(blamed) <= {culprit}):
        return "named"
    return "wrong"


def _ranks_in(value: object) -> list[int]:
    if isinstance(value, list):
        return [rank for rank in value if isinstance(rank, int)]
    return []


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
