"""What the ranks of the tests run: each a main program with one kind of fault."""

from __future__ import annotations

import datetime
import gc
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.exception import RestartAbort
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.rank_assignment import ActivateAllRanks, MaxActiveWorldSize, ShiftRanks
from ft_client.inprocess.state import FrozenState
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess.job import QUICK, seconds
from tests.groups import end_groups

Note = Callable[[Any], None]
LONG_S = 600.0
# Number of the system call in which a thread waits for another, on x86-64.
FUTEX = "202"


class Uncopyable(Exception):
    """An exception that can be neither copied nor pickled."""

    def __init__(self, one: object, other: object) -> None:
        super().__init__(f"{one} and {other}")
        self.held = sys._getframe()

    def __copy__(self) -> Uncopyable:
        raise TypeError("not to be copied")

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def wait(call: CallWrapper) -> None:
    """Makes progress until it is interrupted."""
    while True:
        call.ping()
        time.sleep(0.01)


def me() -> tuple[int, int]:
    """RANK and WORLD_SIZE as they are now."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sum_of_ranks() -> int:
    """A collective over a new gloo group."""
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    value = torch.tensor([distributed.get_rank()])
    distributed.all_reduce(value)
    return int(value)


def main(
    note: Note,
    fault: str = "",
    on: tuple[int, ...] = (1,),
    times: int = 1,
    group: bool = False,
    active: int | None = None,
    options: dict[str, Any] | None = None,
    retry: dict[str, Any] | None = None,
    calls: int = 1,
) -> Any:
    """A function that fails as `fault` says, on the ranks `on` (at entry), in the first `times` rounds."""
    entry = me()[0]

    def function(call: CallWrapper) -> tuple[int, int, int]:
        rank, size = me()
        note(("enter", call.iteration, rank, size))
        if group:
            sum_of_ranks()
        if call.iteration < times:
            if entry in on:
                FAULTS[fault](call, note)
            elif fault in ("returns", "straggles"):
                return rank, size, call.iteration
            elif group:
                distributed.barrier()
            else:
                wait(call)
        total = sum_of_ranks() if group and not distributed.is_initialized() else 0
        if group:
            distributed.barrier()
            end_groups()
        return rank, size, call.iteration + 0 * total

    arguments: dict[str, Any] = {**QUICK, **(options or {})}
    if active is not None:
        arguments["rank_assignment"] = Compose(MaxActiveWorldSize(active), ActivateAllRanks(), ShiftRanks())
    if retry is not None:
        arguments["initialize"] = RetryController(**retry)
    if fault.endswith(" hang") and fault.startswith("in "):
        arguments[fault.split()[1]] = hanging(entry in on)
    elif fault.startswith("in "):
        arguments[fault.removeprefix("in ")] = failing_once(entry in on, note)
    wrapped = Wrapper(**arguments)(function)
    results = [wrapped() for _ in range(calls)]
    note(("after", *me()))
    return results[0] if calls == 1 else results


def failing_once(is_here: bool, note: Note) -> Callable[[FrozenState], FrozenState]:
    """A callback that fails at its first call, on one rank."""
    called = 0

    def callback(state: FrozenState) -> FrozenState:
        nonlocal called
        called += 1
        if is_here and called == 1:
            note("callback failed")
            raise ValueError("the callback failed")
        return state

    return callback


def hanging(is_here: bool) -> Callable[[FrozenState], FrozenState]:
    """A callback that hangs, on one rank."""

    def callback(state: FrozenState) -> FrozenState:
        if is_here:
            time.sleep(LONG_S)
        return state

    return callback


def raise_exception(call: CallWrapper, note: Note) -> None:
    raise ValueError("the function failed")


def raise_base_exception(call: CallWrapper, note: Note) -> None:
    raise KeyboardInterrupt


def die(number: int) -> Callable[[CallWrapper, Note], None]:
    """A signal to itself."""

    def fault(call: CallWrapper, note: Note) -> None:
        os.kill(os.getpid(), number)
        time.sleep(LONG_S)

    return fault


def hang(call: CallWrapper, note: Note) -> None:
    time.sleep(LONG_S)


def hold_the_gil(call: CallWrapper, note: Note) -> None:
    sum(itertools.repeat(0))  # type: ignore[arg-type]


def spin_after_a_ping(call: CallWrapper, note: Note) -> None:
    call.ping()
    while True:
        pass


def exit_3(call: CallWrapper, note: Note) -> None:
    sys.exit(3)


def abort(call: CallWrapper, note: Note) -> None:
    raise RestartAbort("that is enough")


def raise_uncopyable(call: CallWrapper, note: Note) -> None:
    raise Uncopyable(1, 2)


def fail_in_atomic(call: CallWrapper, note: Note) -> None:
    with call.atomic():
        raise ValueError("in atomic")


def hang_in_atomic(call: CallWrapper, note: Note) -> None:
    with call.atomic():
        time.sleep(LONG_S)


FAULTS: dict[str, Callable[[CallWrapper, Note], None]] = {
    "exception": raise_exception,
    "base exception": raise_base_exception,
    "exit": exit_3,
    "abort": abort,
    "uncopyable": raise_uncopyable,
    "atomic": fail_in_atomic,
    "returns": raise_exception,
    "SIGKILL": die(signal.SIGKILL),
    "SIGTERM": die(signal.SIGTERM),
    "SIGSEGV": die(signal.SIGSEGV),
    "hang": hang,
    "hang in atomic": hang_in_atomic,
    "gil": hold_the_gil,
    "livelock": spin_after_a_ping,
    "straggles": lambda call, note: time.sleep(LONG_S),
    "in abort hang": raise_exception,
    "": lambda call, note: None,
    "in initialize": lambda call, note: None,
    "in health_check": lambda call, note: None,
    "in finalize": raise_exception,
    "in abort": raise_exception,
    "in completion": lambda call, note: None,
    "in terminate": exit_3,
}


INSIDE = "the other rank is where it is to be interrupted"


def of_iteration() -> distributed.TCPStore:
    """The store that the round's first rank hosts."""
    return distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def swallowing(note: Note) -> Any:
    """A function that swallows the first interruption."""
    entry = me()[0]

    def function(call: CallWrapper) -> int:
        if call.iteration:
            return call.iteration
        if entry:
            of_iteration().get(INSIDE)
            raise ValueError("the function failed")
        try:
            of_iteration().set(INSIDE, "")
            time.sleep(LONG_S)
        except BaseException as swallowed:
            note(type(swallowed).__name__)
        time.sleep(LONG_S)
        return -1

    return Wrapper(**QUICK)(function)()


def atomically(note: Note) -> Any:
    """A function that is in an atomic part while another rank fails; what it does there is done whole."""
    entry = me()[0]

    def function(call: CallWrapper) -> int:
        if call.iteration:
            return call.iteration
        if entry:
            of_iteration().get(INSIDE)
            raise ValueError("the function failed")
        with call.atomic(), call.atomic():
            note("in")
            of_iteration().set(INSIDE, "")
            for part in range(300):
                time.sleep(0.001)
                note(part)
            note("out")
        time.sleep(LONG_S)
        return -1

    return Wrapper(**QUICK)(function)()


def in_group(note: Note, iterations: int = 3, hang: bool = False, early: bool = False) -> Any:
    """Collectives over a new group in each round; one rank fails, or does not come, while others wait in one."""
    entry = me()[0]

    def function(call: CallWrapper) -> tuple[int, int]:
        if early and call.iteration < iterations and entry == call.iteration:
            raise ValueError("failed before there is a group")
        total = sum_of_ranks()
        note(("sum", call.iteration, total))
        if call.iteration < iterations:
            if entry == call.iteration % call.state.initial_world_size:  # type: ignore[operator]
                if hang:
                    time.sleep(LONG_S)
                raise ValueError("the function failed")
            distributed.barrier()
        end_groups()
        return total, call.iteration

    timeouts = {**QUICK, "soft_timeout": seconds(2), "hard_timeout": seconds(30)} if hang else QUICK
    return Wrapper(**timeouts)(function)()


def many(note: Note, restarts: int = 200) -> Any:
    """Restarts in a row, and what the process has in five calls before most of them and in the last five."""
    entry = me()[0]

    def function(call: CallWrapper) -> int:
        if 20 <= call.iteration < 25 or call.iteration > restarts - 5:
            tasks, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))  # noqa: PTH208
            pages = int(open("/proc/self/statm").read().split()[1])  # noqa: PTH123, SIM115
            note((call.iteration, tasks, descriptors, pages))
        if call.iteration < restarts:
            if call.iteration % call.state.world_size == entry:
                raise ValueError("the function failed")
            time.sleep(LONG_S)
        return call.iteration

    logging.disable(logging.CRITICAL)
    return Wrapper(**QUICK)(function)()


def many_models(note: Note, restarts: int) -> Any:
    """Restarts in a row of a function with a model over a new group, and what Python and the process have meanwhile."""
    entry, first = me()[0], 20

    def function(call: CallWrapper) -> int:
        if call.iteration in (first, restarts):
            gc.collect()
            pages = int(open("/proc/self/statm").read().split()[1])  # noqa: PTH123, SIM115
            note((call.iteration, len(gc.get_objects()), pages))
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        while call.iteration < restarts:
            model(torch.ones(4, 64)).sum().backward()
            if call.iteration % call.state.world_size == entry:
                raise ValueError("the function failed")
        del model
        end_groups()
        return call.iteration

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    return Wrapper(**QUICK)(function)()


def initialized(note: Note) -> Any:
    """A wrapped function called where there is a process group already."""
    sum_of_ranks()
    return Wrapper(**QUICK)(lambda: None)()


def with_environment(note: Note, missing: str) -> Any:
    """A call without a variable of the environment."""
    del os.environ[missing]
    return Wrapper(**QUICK)(lambda: None)()


def breaks_while_groups_are_made(note: Note, rounds: int) -> Any:
    """In each of so many rounds another rank fails as soon as it has its group, and the others use theirs.

    A rank that is not freed is ended by the tests' own limit: gloo's is longer.
    """

    def train(call: CallWrapper) -> int:
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        if call.iteration < rounds and rank == call.iteration % world_size:
            raise ValueError("on purpose")
        value = torch.ones(2)
        while call.iteration < rounds:
            distributed.all_reduce(value)
        distributed.barrier()
        end_groups()
        return call.iteration

    return Wrapper(**QUICK)(train)()


def breaks_while_the_other_is_stopped(note: Note, rounds: int) -> Any:
    """In each of so many rounds one of two ranks stops the other, asks it for data, fails and recovers.

    The other goes on after that. It then answers with a send, on a connection of which the first needs nothing more.
    """
    stopped: list[int] = []

    def go_on(state: FrozenState) -> FrozenState:
        while stopped:
            os.kill(stopped.pop(), signal.SIGCONT)
        return state

    def train(call: CallWrapper) -> int:
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=LONG_S))
        rank = distributed.get_rank()
        processes = torch.zeros(2, dtype=torch.int64)
        processes[rank] = os.getpid()
        distributed.all_reduce(processes)
        if call.iteration == rounds:
            distributed.barrier()
            end_groups()
            return call.iteration
        value = torch.ones(2)
        if rank == call.iteration % 2:
            other = int(processes[1 - rank])
            while Path(f"/proc/{other}/syscall").read_text().split()[0] != FUTEX:
                time.sleep(0.001)
            stopped.append(other)
            os.kill(other, signal.SIGSTOP)
            distributed.all_reduce(value, async_op=True)
            raise ValueError("on purpose")
        while True:
            distributed.all_reduce(value)

    return Wrapper(**QUICK, finalize=go_on)(train)()
