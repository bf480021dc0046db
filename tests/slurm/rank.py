"""A rank for batch jobs, without torch: rank 0 does, in its nth start, the nth of the words behind FOLDER.

finish   makes the finished flag and ends
over     ends with 0, without the flag
crash    ends with 1; `exit:17` with 17
hang     sends one heartbeat and no other
train    counts steps until it is told to end; then saves the step and ends

The others train. All go on at the step they saved.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from ft_client import RankMonitorClient

_MOST_S = 300.0


def main(folder: Path, *words: str) -> int:
    """Does the word of this start; its exit code."""
    rank, node = os.environ["RANK"], os.environ["SLURMD_NODENAME"]
    started = folder / f"starts-{rank}"
    start = len(started.read_text()) if started.exists() else 0
    started.write_text("x" * (start + 1))
    word = words[start] if rank == "0" else words[start] if words[start] in ("finish", "over") else "train"
    saved = folder / f"step-{rank}"
    print(f"start rank {rank} of {os.environ['WORLD_SIZE']} on {node}: {word}, step {_number_in(saved)}", flush=True)
    what, _, code = word.partition(":")
    match what:
        case "finish":
            Path(os.environ["FAULT_TOL_FINISHED_FLAG_FILE"]).touch()
        case "crash" | "exit":
            return int(code or 1)
        case "hang":
            client = RankMonitorClient()
            client.init_workload_monitoring()
            client.send_heartbeat()
            time.sleep(_MOST_S)
        case "train":
            _train(saved)
    return 0


def _train(saved: Path) -> None:
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    step, deadline = _number_in(saved), time.monotonic() + _MOST_S
    print("training", flush=True)
    while not told and time.monotonic() < deadline:
        step += 1
        time.sleep(0.01)
    saved.write_text(str(step))
    print(f"saved step {step}", flush=True)


def _number_in(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
