"""`shared_utils.inject_fault` of the peer, formerly `inprocess.tools.inject_fault`: its faults, carried out as ours.

Megatron-LM and NeMo-RL break their trainings by these names. This file decides which rank fails and when, as the peer
does; what a fault does to the process is in `ft_client.inject`, which also reports it to the launcher.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable, Sequence

from ft_client import inject
from ft_client.inject.this_rank import this_rank

InjectedException = inject.FaultOnPurpose
"""The exception of the faults that raise one, by the peer's name."""

Callback = Callable[[], object]


class Fault(enum.Enum):
    """The peer's faults, by its names and values: scripts send the values between ranks.

    Not the `Fault` of the launcher, which is what was found to have failed.
    """

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
"""A WORKLOAD_EXC that has not been raised: from when on (monotonic seconds) `maybe_raise_workload_exception` raises it,
and what is called before."""


def inject_fault(
    faults: Sequence[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callback | None = None,
) -> None:
    """Injects one of `faults` into some ranks, after a delay. Every rank calls it, and draws the same.

    Args:
        faults: the faults of which one is drawn.
        num_faults: how many ranks fail; or the fewest and the most, of which a number is drawn.
        keep_alive: how many of the first ranks never fail.
        delay: seconds; or the fewest and the most, of which a number is drawn.
        seed: the seed of all draws, the same on every rank.
        callback: called on each rank that fails, right before the fault.

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
    """Injects a fault into this rank after `delay` seconds. Does not wait.

    A WORKLOAD_EXC happens only in the next `maybe_raise_workload_exception` after the delay: a place that the script
    has chosen.

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
    """Raises a WORKLOAD_EXC that is due. To be called by the training in each step.

    Raises:
        InjectedException: a WORKLOAD_EXC is due. It is raised once.
    """
    if _workload_exception is not None and time.monotonic() >= _workload_exception[0]:
        callback = _workload_exception[1]
        clear_workload_exception()
        inject.inject_fault(Fault.WORKLOAD_EXC.name, callback=callback)


def clear_workload_exception() -> None:
    """Drops a WORKLOAD_EXC that has not been raised."""
    global _workload_exception
    _workload_exception = None
