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

_MAX_S = 300.0


def main(folder: Path, *words: str) -> int:
    """Does the word of this start; its exit code."""
    rank, node = os.environ["RANK"], os.environ["SLURMD_NODENAME"]
    word = words[_lines_in(folder / "starts")] if rank == "0" else "train"
    if rank == "0":
        with (folder / "starts").open("a") as starts:
            starts.write("one\n")
    elif (ahead := words[_lines_in(folder / "run" / "history.jsonl")]) in ("finish", "over"):
        word = ahead  # of this attempt; a rank that ends before it starts counts no start of its own
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
            time.sleep(_MAX_S)
        case "train":
            _train(saved)
    return 0


def _train(saved: Path) -> None:
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    step, deadline = _number_in(saved), time.monotonic() + _MAX_S
    print("training", flush=True)
    while not told and time.monotonic() < deadline:
        step += 1
        time.sleep(0.01)
    saved.write_text(str(step))
    print(f"saved step {step}", flush=True)


def _lines_in(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _number_in(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
