"""What the ranks of `test_preemption.py` run: `program(rank, world_size, ...)` for `tests.client.rerun.ranks.Ranks`."""

from __future__ import annotations

import os
import signal
from typing import Any

from ft_client.preemption import DistributedSignalHandler, PreemptionGuard
from tests.client import asked


def asks(rank: int, world_size: int, signalled: int, at: int, sig: int) -> dict[str, Any]:
    """Steps until the ranks agree to stop; `signalled` gets the signal in step `at`."""
    before = signal.getsignal(sig)
    with DistributedSignalHandler(sig) as handler, asked.counted() as found:
        for step in range(10):
            if step == at and rank == signalled:
                os.kill(os.getpid(), sig)
            if handler.should_stop():
                break
        agreed = list(found)
        flags = handler.signals_received()
        released = [handler.release(), handler.release()]
    restored = signal.getsignal(sig) is before
    return {"step": step, "agreed": agreed, "flags": flags, "released": released, "restored": restored}


def guards(rank: int, world_size: int, signalled: int, at: int) -> dict[str, Any]:
    """The same with the guard; what it saved, and how it left."""
    saved, step, code = [], 0, None
    try:
        with PreemptionGuard(lambda: saved.append(step), sig=signal.SIGUSR1, exit_code=3) as guard:
            for step in range(10):
                if step == at and rank == signalled:
                    os.kill(os.getpid(), signal.SIGUSR1)
                guard.check()
    except SystemExit as wish:
        code = wish.code
    return {"saved": saved, "code": code}
