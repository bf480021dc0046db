"""`inject_fault`: a fault on purpose by a call in a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ft_client.inject.place import here
from ft_client.inject.strike import Strike
from rank_monitor.contract import injection


def inject_fault(
    kind: str, delay_s: float = 0, rank: int | None = None, callback: Callable[[], object] | None = None
) -> None:
    """A fault on purpose: at once, in the calling thread, or after a delay, wherever the training is then.

    Args:
        kind: a kind as in `--ft-inject`, or one with parts: `"kind:exit,code:3"`.
        delay_s: seconds; 0: now.
        rank: the global rank that fails, on all others nothing happens; None: whoever calls.
        callback: called on that rank right before it happens.

    Raises:
        ValueError: no such kind; a part that makes no sense here; with a delay, a kind that happens to the main
            thread was asked for in another.
        FaultOnPurpose, BaseFaultOnPurpose, MemoryError, RuntimeError: the fault itself, of some kinds.
    """
    fault, place = injection.parse(kind if ":" in kind else f"kind:{kind}"), here()
    if delay_s < 0:
        raise ValueError(f"delay_s={delay_s!r} must not be negative")
    fault = dataclasses.replace(fault, rank=place.rank if rank is None else rank, cycle=injection.ANY)
    if not place.is_meant(fault):
        return
    strike = Strike(fault, place, callback)
    if delay_s:
        strike.later(delay_s)
    else:
        strike.now()
