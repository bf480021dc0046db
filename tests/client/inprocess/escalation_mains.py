"""What ranks run whose restarts in process help nothing, or whose peer is gone."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any

from torch import distributed

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.health_check import FaultCounter
from ft_client.inprocess.state import FrozenState
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess.job import QUICK, seconds
from tests.client.inprocess.mains import Note, me, of_iteration, sum_of_ranks, wait
from tests.ports import free_port


def without_progress(note: Note, limit: int) -> Any:
    """Reports progress in the first round, and never again; each time another rank fails."""
    entry = me()[0]

    def function(call: CallWrapper) -> None:
        note(call.iteration)
        if call.iteration == 0:
            call.ping()
        store = of_iteration()  # all are here before one fails: a round counts by a rank that it ran on
        store.add("here", 1)
        while store.add("here", 0) < call.state.world_size:
            time.sleep(0.001)
        if call.iteration % call.state.world_size == entry:
            raise ValueError("the function failed")
        time.sleep(600)

    return Wrapper(**{**QUICK, "no_progress_limit": limit})(function)()


def hangs_in_a_child(note: Note) -> int:
    """Calls a wrapped function, and then another one in a forked child, which hangs. Returns the child's exit code."""
    Wrapper(**QUICK)(of_no_effect)()
    os.environ["MASTER_PORT"] = str(free_port())
    options = {**QUICK, "soft_timeout": seconds(1.5), "hard_timeout": seconds(30), "soft_timeout_limit": 1}
    child = os.fork()
    if not child:
        try:
            Wrapper(**options)(partial(time.sleep, 60))()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def of_no_effect() -> None:
    """Returns at once."""


def counted(note: Note, victim: int) -> Any:
    """Whose fault it is when a rank closes its connections, and its end is seen only later."""
    entry = me()[0]
    counter = FaultCounter(max_rank_faults=0)

    def finalize(state: FrozenState) -> FrozenState:
        note(("fault", type(state.fn_exception).__name__))
        return state

    def function(call: CallWrapper) -> tuple[int, int]:
        total = sum_of_ranks()
        if call.iteration == 0:
            if entry == victim:
                with call.atomic():
                    close_connections()
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGKILL)
            distributed.barrier()
            wait(call)
        return total, counter.faults_count

    return Wrapper(**QUICK, health_check=counter, finalize=finalize)(function)()


def close_connections() -> None:
    """Shuts the connections of the group down, as the end of this process would."""
    kept = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (one is the listing's own)
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[1] != kept:
                found.shutdown(socket.SHUT_RDWR)
