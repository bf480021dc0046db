"""A rank whose training restarts in process: it adds up samples, in step with the others, and saves each step.

What it comes to does not depend on how many ranks there are. It holds where the test says so, and goes on when told.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.wrapper import Wrapper
from tests.faults.worker import write

STEPS = 10
HOLD_AT = 5
SAMPLES = 60
_POLL_S = 0.005
_LONG = datetime.timedelta(seconds=120)
MEMBER = int(os.environ.get("RANK", "0"))
FOLDER = Path(sys.argv[-1])


class Told(Exception):
    """The test wants an exception here."""


def train(wrapper: CallWrapper) -> None:
    """The wrapped function: from the last saved step to the end."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    saved = FOLDER / "saved"
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "total": 0}
    call = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{wrapper.iteration}"
    write(FOLDER / "calls" / f"{call}-{MEMBER}", json.dumps({"pid": os.getpid(), "world": world}))
    for step in range(state["step"], STEPS):
        if step == HOLD_AT:
            _hold(call)
        write(
            FOLDER / "parts" / f"{call}-{step}-{rank}",
            str(sum(range(SAMPLES * step, SAMPLES * (step + 1))[rank::world])),
        )
        parts = [FOLDER / "parts" / f"{call}-{step}-{peer}" for peer in range(world)]
        while not all(part.exists() for part in parts):
            time.sleep(_POLL_S)
        state = {"step": step + 1, "total": state["total"] + sum(int(part.read_text()) for part in parts)}
        if rank == 0 and step + 1 <= HOLD_AT:
            write(saved, json.dumps(state))
    if rank == 0:
        write(FOLDER / "result", str(state["total"]))


def _hold(call: str) -> None:
    """Waits for the test's word in this round: `go`, or what else to do, and which rank."""
    print(f"rank {MEMBER} holds in {call}", flush=True)
    write(FOLDER / "holds" / f"{call}-{MEMBER}", "")
    word = FOLDER / f"word-{call}"
    while not word.exists():
        time.sleep(_POLL_S)
    what, _, who = word.read_text().partition(" ")
    if what == "raise" and int(who) == MEMBER:
        # A rank that is interrupted before it has read the word would not cling.
        while len(list(FOLDER.glob("clinging-*"))) < len(list(FOLDER.glob("clings-*"))):
            time.sleep(_POLL_S)
        raise Told
    if what == "raise" and (FOLDER / f"clings-{MEMBER}").exists():
        _cling()
    if what == "exit" and int(who) == MEMBER:
        sys.exit(3)
    if what == "vanish" and int(who) == MEMBER:
        os._exit(3)


def _cling() -> None:
    """Is interrupted, and does not come to the end of its cleanup."""
    try:
        (FOLDER / f"clinging-{MEMBER}").touch()
        time.sleep(_LONG.total_seconds())
    finally:
        time.sleep(_LONG.total_seconds())


def main() -> None:
    """One rank."""
    for name in ("calls", "parts", "holds"):
        (FOLDER / name).mkdir(exist_ok=True)
    Wrapper(soft_timeout=_LONG, hard_timeout=1.5 * _LONG, barrier_timeout=2 * _LONG, last_call_wait=0 * _LONG)(train)()


if __name__ == "__main__":
    main()
