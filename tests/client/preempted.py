"""What the ranks of `test_preemption.py` run: `program(rank, world_size, ...)` for `tests.client.rerun.ranks.Ranks`."""

from __future__ import annotations

import itertools
import math
import os
import signal
from typing import Any
from unittest import mock

import torch.distributed as dist

from ft_client import piggyback
from ft_client.piggyback import Piggyback
from ft_client.preemption import DistributedSignalHandler, PreemptionGuard
from ft_client.rerun import RerunStateMachine
from tests.client import asked


def asks(rank: int, world_size: int, struck: int, at: int, sig: int, one_host: bool) -> dict[str, Any]:
    """Steps until the ranks agree to stop; `struck` gets the signal in step `at`."""
    before = signal.getsignal(sig)
    with DistributedSignalHandler(sig) as handler, asked.counted(one_host) as found:
        for step in range(10):
            if step == at and rank == struck:
                os.kill(os.getpid(), sig)
            if handler.should_stop():
                break
        agreed = list(found)
        flags = handler.signals_received()
        released = [handler.release(), handler.release()]
    restored = signal.getsignal(sig) is before
    return {"step": step, "agreed": agreed, "flags": flags, "released": released, "restored": restored}


def rides(rank: int, world_size: int, struck: int, at: int, short_s: float, one_host: bool) -> dict[str, Any]:
    """Steps of the rerun machine with the guard; what was agreed on, and in which step each rank left."""
    machine = RerunStateMachine(mode="validate_results")
    with (
        mock.patch.object(piggyback, "of_process", Piggyback()),
        mock.patch.object(piggyback, "SHORT_STEP_S", short_s),
        asked.counted(one_host) as agreed,
        DistributedSignalHandler(signal.SIGUSR1) as handler,
    ):
        for step in range(10):
            runs = itertools.count()
            while machine.should_run_forward_backward(None):
                wrong = (step, rank, next(runs)) == (1, 0, 0)
                machine.validate_result(math.nan if wrong else 1.0, math.isnan, "loss is NaN")
                if (step, rank) == (at, struck):
                    os.kill(os.getpid(), signal.SIGUSR1)
            if handler.should_stop():
                break
    return {"step": step, "agreed": agreed}


def agrees(rank: int, world_size: int) -> dict[str, Any]:
    """What a flag that rank 1 alone has is said to be, by turns that each begin anew and last so many seconds."""
    told, first_s = {}, 1000.0 * rank

    def flag() -> bool:
        return rank == 1

    def other() -> bool:
        return False

    one = Piggyback()

    def reduce(after_s: float) -> list[float]:
        nonlocal first_s
        first_s += after_s
        return one.max_over_ranks([float(rank)], now_s=first_s)

    def settles(*, every: bool = True) -> None:
        reduce(0.1)
        if every or rank:
            one.taken(flag)

    told["nobody rides"] = [reduce(0.1), one.taken(flag)]
    if rank == 0:
        one.board(other)  # and never leaves: the other rank was started later
    one.board(flag)
    settles()
    told["rides"] = [reduce(0.1), one.taken(flag), one.taken(flag)]
    told["another's"] = [reduce(0.1), one.taken(other)]
    settles()
    told["one rank was long"] = [reduce(10.0 if rank == 0 else 0.1), one.taken(flag)]
    settles(every=False)
    told["one rank did not ask"] = [reduce(0.1), one.taken(flag)]
    if rank == 0:
        one.leave(flag)
    told["one rank has none"] = [reduce(0.1), one.taken(flag)]
    one.board(flag)
    settles()
    reduce(0.1)
    one.leave(flag)
    one.board(flag)
    told["before it came"] = one.taken(flag)
    settles()
    reduce(0.1)
    before, dist.group.WORLD = dist.group.WORLD, dist.new_group(list(range(world_size)))
    told["of another group"] = one.taken(flag)
    dist.group.WORLD = before
    return told


def guards(rank: int, world_size: int, struck: int, at: int) -> dict[str, Any]:
    """The same with the guard; what it saved, and how it left."""
    saved, step, code = [], 0, None
    try:
        with PreemptionGuard(lambda: saved.append(step), sig=signal.SIGUSR1, exit_code=3) as guard:
            for step in range(10):
                if step == at and rank == struck:
                    os.kill(os.getpid(), signal.SIGUSR1)
                guard.check()
    except SystemExit as wish:
        code = wish.code
    return {"saved": saved, "code": code}
