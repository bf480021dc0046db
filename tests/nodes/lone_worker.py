"""A rank that needs no other: it runs until the test lets it end, or has it fail."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

END = "end"
FAILED = 3
_POLL_S = 0.005


def fail_file(cycle: int, rank: int) -> str:
    """The file in the job's folder that has a rank of a cycle fail."""
    return f"fail-{cycle}-{rank}"


def done_file(rank: int) -> str:
    """The file in the job's folder that lets one rank end before the others."""
    return f"done-{rank}"


def main(folder: Path) -> None:
    """Waits for one of the three."""
    fails = folder / fail_file(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]))
    done = folder / done_file(int(os.environ["RANK"]))
    while not (folder / END).exists() and not done.exists():
        if fails.exists():
            sys.exit(FAILED)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
