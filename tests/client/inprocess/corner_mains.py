"""What the ranks of `test_wrapper_corners.py` run."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.exception import RestartAbort
from ft_client.inprocess.health_check import FaultCounter
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FilterCountGroupedByKey,
    Layer,
    MaxActiveWorldSize,
    ShiftRanks,
    Tree,
)
from ft_client.inprocess.restart_config import InProcessRestartConfig
from ft_client.inprocess.state import FrozenState
from ft_client.inprocess.store import TCPStore
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess.job import QUICK, seconds
from tests.client.inprocess.mains import INSIDE, LONG_S, Note, me, of_iteration, wait


def fails_once(call: CallWrapper, fails: bool) -> tuple[int, int, int]:
    """Fails in round 0 where `fails`; elsewhere it is interrupted then."""
    if call.iteration == 0:
        if fails:
            raise ValueError("the function failed")
        wait(call)
    return (*me(), call.iteration)


def not_divisible(note: Note, divisor: int) -> Any:
    """A rank assignment under which nobody is active."""
    few = Compose(ActiveWorldSizeDivisibleBy(divisor), ActivateAllRanks(), ShiftRanks())
    return Wrapper(**QUICK, rank_assignment=few)(me)()


def last_exits(call: CallWrapper) -> None:
    """The last rank ends."""
    if call.state.rank == 2:
        sys.exit(3)
    wait(call)


def not_divisible_later(note: Note) -> Any:
    """Three may be active, and two may not."""
    few = Compose(ActiveWorldSizeDivisibleBy(3), ActivateAllRanks(), ShiftRanks())
    return Wrapper(**QUICK, rank_assignment=few)(last_exits)()


def all_discarded(note: Note) -> Any:
    """Two are too few for the tree."""
    return Wrapper(**QUICK, rank_assignment=Tree([Layer(min_ranks=3)]))(last_exits)()


def killed_while_assigning(note: Note, at: int, tree: bool) -> Any:
    """Member 1 dies between the others' arrival at a gather and its own, in round `at`."""
    entry = me()[0]

    def key(state: FrozenState) -> str:
        if entry == 1 and state.iteration == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if call.iteration < at:
            raise ValueError("the function failed")
        return (*me(), call.iteration)

    grouped = Compose(ActivateAllRanks(), ShiftRanks(), FilterCountGroupedByKey(key, lambda count: True))
    assignment = Tree([Layer(key_or_fn=key)]) if tree else grouped
    return Wrapper(**QUICK, rank_assignment=assignment)(function)()


def killed_in(note: Note, where: str) -> Any:
    """Member 0 fails once; member 1 dies in a callback of the restart, or while the others have returned.

    `terminate` is called where a rank ends itself: there member 1's exit is the only fault.
    """
    entry = me()[0]

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if where == "function":
            if entry == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return (*me(), call.iteration)
        if where == "terminate" and entry == 1:
            sys.exit(3)
        return fails_once(call, entry == 0 and where != "terminate")

    def callback(state: FrozenState) -> FrozenState:
        if entry == 1 and (state.iteration == 1 or where not in ("initialize", "completion")):
            os.kill(os.getpid(), signal.SIGKILL)
        return state

    given: dict[str, Any] = {} if where == "function" else {where: callback}
    return Wrapper(**QUICK, **given)(function)()


def returns_nothing(note: Note, where: str) -> Any:
    """A callback forgets to return the state."""
    entry = me()[0]
    note_warnings(note)

    def function(call: CallWrapper) -> tuple[int, int, int]:
        return fails_once(call, entry == 0)

    def callback(state: FrozenState) -> Any:
        return state if entry == 0 else None

    return Wrapper(**QUICK, **{where: callback})(function)()


def hangs_in(note: Note, where: str, how: str, times: int = 99) -> Any:
    """A callback that hangs on rank 1 (at entry): it does nothing, or executes bytecode for ever.

    Args:
        where: the argument of the wrapper. With `times` the health check is that before the function, else after it.
        times: how often it hangs.
    """
    entry, hung = me()[0], 0

    def callback(state: Any) -> Any:
        nonlocal hung
        is_early = where == "health_check" and times > 1 and state.fn_exception is None
        if entry == 1 and hung < times and not is_early:
            hung += 1
            note("hangs")
            while how == "spins":
                pass
            time.sleep(LONG_S)
        return state

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if entry == 1 and where == "terminate":
            sys.exit(3)
        if entry == 1 and times > 1 and where in ("finalize", "health_check"):
            raise ValueError("the function failed")
        rank, size = me()
        return rank, size, call.iteration

    short = {
        "soft_timeout": seconds(2),
        "hard_timeout": seconds(3),
        "termination_grace_time": seconds(1),
        "completion_timeout": seconds(3),
    }
    callbacks: dict[str, Any] = {where: callback}
    if where == "rank_assignment":
        short |= {"heartbeat_timeout": seconds(4), "barrier_timeout": seconds(5)}
        callbacks[where] = Compose(ActivateAllRanks(), ShiftRanks(), callback)
    return Wrapper(**{**QUICK, **short, **callbacks})(function)()


def swallows_for_ever(note: Note, aborts: bool) -> Any:
    """Rank 1 (at entry) works in a loop that lets nothing through; rank 0 fails once rank 1 is in it.

    The loop is in another one: an interruption between two turns of the inner one ends that only. A rank 1 that came to
    the next round would be in its loop there, in which nobody fails, and all would wait for it.
    """
    entry = me()[0]

    def swallow(call: CallWrapper) -> None:
        while True:
            with contextlib.suppress(BaseException), call.disable_hang_protection():
                time.sleep(0.01)

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if entry == 1:
            of_iteration().set(INSIDE, "")
            while True:
                with contextlib.suppress(BaseException):
                    swallow(call)
        if entry == 0 and call.iteration == 0:
            of_iteration().get(INSIDE)
        return fails_once(call, entry == 0)

    short: dict[str, Any] = {"soft_timeout": seconds(2), "hard_timeout": seconds(3)}
    if not aborts:
        short["abort"] = None
    return Wrapper(**{**QUICK, **short})(function)()


def note_warnings(note: Note) -> None:
    class Noting(logging.StreamHandler[Any]):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    logging.getLogger("ft_client.inprocess").addHandler(Noting())


def advised(note: Note) -> Any:
    """Collectives with a timeout that is shorter than hard_timeout, where there is an NCCL of this version."""
    from torch.distributed import distributed_c10d

    from ft_client.inprocess import wrapper

    note_warnings(note)
    wrapper._nccl_version = lambda: (2, 27, 3)
    distributed_c10d.default_pg_nccl_timeout = seconds(60)
    return Wrapper(**QUICK)(me)()


def told_at_debug_level(note: Note) -> Any:
    """Nothing fails, and the program has asked for all that its loggers say."""
    stream = io.StringIO()
    logging.basicConfig(level=logging.DEBUG, stream=stream, force=True)
    result = Wrapper(**QUICK)(me)()
    for line in stream.getvalue().splitlines():
        note(line)
    return result


def unhealthy(note: Note) -> Any:
    """The check fails where the function failed."""

    def check(state: FrozenState) -> FrozenState:
        if state.fn_exception is not None:
            raise ZeroDivisionError("no card")
        return state

    entry = me()[0]
    return Wrapper(**QUICK, health_check=check)(lambda call_wrapper: fails_once(call_wrapper, entry == 0))()


def leaves_connections(note: Note, end: str) -> int:
    """How many connections to the store are left after the call."""

    def function(call: CallWrapper) -> None:
        if end != "returns" and call.iteration == 0:
            raise ValueError("the function failed")
        if end == "fails":
            raise RestartAbort("enough")

    def call() -> None:
        with contextlib.suppress(RestartAbort):
            Wrapper(**QUICK)(function)()

    gc.disable()  # it would end them, some time
    call()
    return sum(type(one) is TCPStore for one in gc.get_objects())


def nobody_serves(note: Note) -> Any:
    """Rank 0 does not call the function, so that rank 1 finds no store."""
    if me()[0] == 0:
        return None
    return Wrapper(**QUICK, store_kwargs={"timeout": seconds(1)})(me)()


def with_a_spare(note: Note, active: int) -> Any:
    """The function waits in round 0; a rank may be sent SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have turned off

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if call.iteration == 0:
            note("waits")
        return fails_once(call, False)

    def ready(state: FrozenState) -> FrozenState:
        note("ready")
        return state

    few = Compose(MaxActiveWorldSize(active), ActivateAllRanks(), ShiftRanks())
    return Wrapper(**QUICK, rank_assignment=few, initialize=ready)(function)()


def abort_raises(note: Note, error: str) -> Any:
    """The abort of rank 0 raises what ends a rank."""
    entry = me()[0]

    def abort(state: FrozenState) -> FrozenState:
        if entry == 0:
            raise {"RestartAbort": RestartAbort("enough"), "exit": SystemExit(5)}[error]
        return state

    return Wrapper(**QUICK, abort=abort)(lambda call_wrapper: fails_once(call_wrapper, entry == 1))()


def late_spare(note: Note) -> Any:
    """The spare's callback fails when all others have returned long since."""
    entry = me()[0]

    def initialize(state: FrozenState) -> FrozenState:
        if entry == 1:
            time.sleep(3)
            raise ValueError("the callback failed")
        return state

    few = Compose(MaxActiveWorldSize(1), ActivateAllRanks(), ShiftRanks())
    return Wrapper(**QUICK, rank_assignment=few, initialize=initialize)(me)()


def terminate_exits(note: Note) -> Any:
    """`terminate` ends the process."""
    entry = me()[0]

    def terminate(state: FrozenState) -> FrozenState:
        sys.exit(7)

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if call.iteration == 0 and entry == 1:
            raise RestartAbort("enough")
        return fails_once(call, False)

    return Wrapper(**QUICK, terminate=terminate)(function)()


def wrong_arguments(note: Note) -> Any:
    """The arguments do not fit."""
    return Wrapper(**QUICK)(lambda one: one)(1, 2)


def wrong_arguments_with_wrapper(note: Note) -> Any:
    """The same of a function that is given the wrapper."""
    return Wrapper(**QUICK)(lambda call_wrapper, one: one)(1, 2, 3)


def nested(note: Note) -> Any:
    """A wrapped function calls one."""
    inner = Wrapper(**QUICK)(lambda: 1)

    def function(call: CallWrapper) -> str:
        try:
            return str(inner())
        except RuntimeError as error:
            return str(error)

    return Wrapper(**QUICK)(function)()


class Model:
    """Something large."""


def keeps_a_model(note: Note) -> Any:
    """Whether what a failed call of the function held is gone when the next begins, with no garbage collection."""
    import gc

    gc.disable()
    entry, models = me()[0], list[Any]()

    def function(call: CallWrapper) -> int:
        note(("alive", call.iteration, sum(model() is not None for model in models)))
        model = Model()
        models.append(weakref.ref(model))
        if call.iteration < 2:
            if entry == call.iteration:
                try:
                    raise KeyError("first")
                except KeyError:
                    raise ValueError("the function failed") from None
            wait(call)
        return call.iteration

    return Wrapper(**QUICK)(function)()


def in_consequence(note: Note) -> Any:
    """A rank whose function fails because it is interrupted for another one is not to blame."""
    entry = me()[0]

    def function(call: CallWrapper) -> int:
        if call.iteration < 2:
            if entry == 1:
                raise ValueError("the function failed")
            try:
                wait(call)
            except BaseException:
                raise RuntimeError("in consequence") from None
        return call.iteration

    return Wrapper(**QUICK, health_check=FaultCounter(0 if entry == 0 else 5))(function)()


def stopped(note: Note, go: str) -> Any:
    """Rank 1 is stopped in round 0; rank 0 fails in the first four, once it may."""
    entry = me()[0]

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if call.iteration < 4:
            if entry == 0:
                wait_for(Path(go))
                raise ValueError("the function failed")
            with call.disable_hang_protection():  # or the monitor would end it
                note("waits")
                wait(call)
        if entry == 0:
            note("last")
            wait_for(Path(go).with_name("end"))
        return (*me(), call.iteration)

    short = {"soft_timeout": seconds(4), "hard_timeout": seconds(5), "barrier_timeout": seconds(6)}
    short |= {"heartbeat_timeout": seconds(5)}
    return Wrapper(**{**QUICK, **short})(function)()


def wait_for(path: Path) -> None:
    """Until there is a file."""
    while not path.exists():
        time.sleep(0.02)


def as_configured(note: Note, active: int, exits: int) -> Any:
    """The wrapper of Megatron Bridge's options; in each of the first rounds one rank exits."""
    config = InProcessRestartConfig(enabled=True, active_world_size=active, granularity="rank", last_call_wait=0)

    def function(call: CallWrapper) -> tuple[int, int, int]:
        if call.iteration < exits:
            if call.state.initial_rank == call.iteration:
                sys.exit(3)
            wait(call)
        return (*me(), call.iteration)

    return config.wrapper()(function)()


def by_srun(note: Note, tasks: str | None) -> Any:
    """By nodes, as a task of srun: without torchrun's variables."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if tasks is not None:
        os.environ["SLURM_STEP_TASKS_PER_NODE"] = tasks
    return InProcessRestartConfig(enabled=True, last_call_wait=0).wrapper()(me)()
