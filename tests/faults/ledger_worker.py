"""A rank that trains with every kind of section, saves, and dies once where its test says so."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import ft_client as ft

STEPS, SAVED, KILLED_IN = 12, 5, 9
STEP_S = 0.02


def main() -> None:
    """One rank, which resumes after the step that it has saved."""
    folder, rank = Path(sys.argv[-1]), os.environ["RANK"]
    checkpoint = folder / f"saved-{rank}"
    ft.init()
    with ft.section("setup"):
        time.sleep(STEP_S)
    first = 0
    if checkpoint.exists():
        with ft.section("load_checkpoint"):
            first = int(checkpoint.read_text()) + 1
            time.sleep(STEP_S)
    for step in ft.steps(range(first, STEPS), start=first):
        with ft.section("data"):
            time.sleep(STEP_S)
        time.sleep(STEP_S)
        if step == KILLED_IN and (folder / f"die-{rank}").exists():
            (folder / f"die-{rank}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == SAVED:
            with ft.section("checkpointing"):
                time.sleep(STEP_S)
                checkpoint.write_text(str(step))
    with ft.section("evaluation"):
        time.sleep(STEP_S)
    with ft.section("upload"):
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
