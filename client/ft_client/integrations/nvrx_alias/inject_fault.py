"""`shared_utils.inject_fault` of the peer, formerly `inprocess.tools.inject_fault`: its faults, carried out as ours.

Megatron-LM and NeMo-RL break their trainings by these names. Knows which rank and when; what a fault does stands in
`ft_client.inject`.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable, Sequence

from ft_client import inject
from ft_client.inject.this_rank import this_rank

InjectedException = inject.FaultOnPurpose
"""The exception of the faults that raise one."""

Callback = Callable[[], object]


class Fault(enum.Enum):
    """The peer's faults. The values travel between ranks."""

    GPU_ERROR = 1
    GPU_SLEEP = 2
    WORKLOAD_EXC = 3
    ASYNC_EXC = 4
    SIGNAL_EXC = 5
    OS_ABORT = 6
    LOCK_GIL = 7
    SEGFAULT = 8
    SIGINT = 9
    SIGKILL = 10
    SIGTERM = 11
    SIGSTOP = 12


_workload_exception: tuple[float, Callback | None] | None = None
"""From when on the training's next look raises, and what is called before."""


def inject_fault(
    faults: Sequence[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callback | None = None,
) -> None:
    """One of `faults` on some ranks, after a delay. Every rank calls it, and draws the same.

    Args:
        faults: of which one is drawn.
        num_faults: how many ranks fail, or the least and the most.
        keep_alive: so many of the first ranks are spared.
        delay: seconds, or the least and the most.
        seed: of the draw.
        callback: called on each rank that fails, right before it does.

    Raises:
        ValueError, TypeError: an argument that makes no sense.
        InjectedException: the fault itself, of some kinds, where there is no delay.
    """
    own = this_rank()
    dice = random.Random(seed)
    least, most = (num_faults, num_faults) if isinstance(num_faults, int) else num_faults
    if isinstance(delay, Sequence):
        delay_s = dice.uniform(*delay)
    else:
        delay_s = delay
    count = min(dice.randint(least, most), own.world - keep_alive)
    ranks = dice.sample(range(keep_alive, own.world), max(count, 0))
    fault = dice.choice(list(faults))
    if own.rank in ranks:
        dispatch_fault_injection(fault, delay_s, callback)


def dispatch_fault_injection(fault: Fault, delay: float, callback: Callback | None = None) -> None:
    """A fault on this rank after `delay` seconds; WORKLOAD_EXC waits for `maybe_raise_workload_exception` then.

    Raises:
        ValueError: it is not a `Fault`, or the delay is negative.
        InjectedException: the fault itself, of some kinds, where there is no delay.
    """
    if not isinstance(fault, Fault):
        raise ValueError(f"fault={fault!r} must be one of {', '.join(Fault.__members__)}")
    if fault is Fault.WORKLOAD_EXC:
        global _workload_exception
        _workload_exception = time.monotonic() + delay, callback
    else:
        inject.inject_fault(fault.name, delay, callback=callback)


def maybe_raise_workload_exception() -> None:
    """To be called by the training regularly.

    Raises:
        InjectedException: a WORKLOAD_EXC is due; once.
    """
    if _workload_exception is not None and time.monotonic() >= _workload_exception[0]:
        callback = _workload_exception[1]
        clear_workload_exception()
        inject.inject_fault(Fault.WORKLOAD_EXC.name, callback=callback)


def clear_workload_exception() -> None:
    """Forgets a WORKLOAD_EXC that has not been raised."""
    global _workload_exception
    _workload_exception = None
