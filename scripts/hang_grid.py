"""Runs hangs of many kinds, and counts how often the rank that causes one is named: `python -m scripts.hang_grid`.

Each run is a job of its own with groups for data and tensor parallelism (`tests/faults/hang_worker.py`), in which one
rank goes wrong at its fourth step. The table is that of docs/hangs.md: named, unknown, and wrong, which must be none.
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

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests/faults/hang_worker.py"
KINDS = (
    "sleeps",
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
    words.add_argument("--runs", type=int, default=200, help="how many runs, over all kinds and sizes in turn")
    words.add_argument("--seed", type=int, default=1, help="chooses the ranks that go wrong")
    asked = words.parse_args()
    choose = random.Random(asked.seed)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    grid = itertools.cycle(itertools.product(asked.ranks, KINDS))
    for number, (ranks, kind) in zip(range(asked.runs), grid, strict=False):
        culprit = choose.randrange(ranks)
        outcome, text = run(kind, ranks, culprit)
        counts[kind][outcome] += 1
        print(f"{number + 1:4} {kind}, rank {culprit} of {ranks}: {outcome}: {text}", flush=True)
    print("\n| what goes wrong | runs | named | unknown | wrong |\n|---|---|---|---|---|")
    for kind, found in counts.items():
        print(f"| {kind} | {found.total()} | {found['named']} | {found['unknown']} | {found['wrong']} |")
    total = sum(counts.values(), Counter[str]())
    print(f"| all | {total.total()} | {total['named']} | {total['unknown']} | {total['wrong']} |")
    return int(total["wrong"] > 0)


def run(kind: str, ranks: int, culprit: int) -> tuple[str, str]:
    """Runs one job. Returns `named`, `unknown` or `wrong`, and what the launcher said."""
    with tempfile.TemporaryDirectory(prefix="hang-") as name:
        folder = Path(name)
        (folder / "hang").write_text(f"{kind}:{culprit}")
        flags = (f"--nproc-per-node={ranks}", "--max-restarts=0", f"--ft-rank-section-timeouts=step:{_LIMIT_S}")
        subprocess.run(
            [sys.executable, "-m", "ft_launcher", *flags, f"--ft-journal-dir={folder}", str(WORKER), str(folder)],
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            cwd=folder,
            check=False,
            capture_output=True,
            timeout=_DEADLINE_S,
        )
        lines = [json.loads(line) for file in folder.glob("journal.*") for line in file.read_text().splitlines()]
    faults = [line for line in lines if line["event"] == "fault"]
    if not faults:
        return "unknown", "no fault: the job did not hang"
    return judged(faults[0], culprit), f"rank {faults[0]['rank']} {faults[0]['what']}; {faults[0]['hint']}"


def judged(fault: dict[str, object], culprit: int) -> str:
    """Whether a fault names the culprit: alone, or as one side of a mismatch or a deadlock, which has no single one."""
    if culprit in (fault["rank"], *_ranks_in(fault["blamed"])):
        return "named"
    if fault["finding"] in ("unknown", "transport"):
        return "unknown"
    return "wrong"


def _ranks_in(value: object) -> list[int]:
    if isinstance(value, list):
        return [rank for rank in value if isinstance(rank, int)]
    return []


if __name__ == "__main__":
    sys.exit(main())
