"""Frees a main thread that is blocked in a call. Runs in another thread; knows nothing of the restart.

Nothing here raises: what could not be freed is logged, and the limits of the wrapper apply. Every step has a thread
and a deadline of its own, since the calls that free others can hang themselves. Uses underscored names of torch: the
list of process groups and their count, the backend of a group, the Flight Recorder's dump and the hook for uncaught
exceptions have no public ones.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ft_client.inprocess import gloo_connections
from ft_client.inprocess.callback import Callback, in_thread
from ft_client.inprocess.state import FrozenState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)

# Below the defaults of soft_timeout (60 s) and hard_timeout (90 s): the next step runs although one hangs.
_STEP_S = 20.0
_HOOK = "init_process_group.<locals>._distributed_excepthook"
# `abort` of these backends does nothing; the connections of gloo are shut down instead.
_ABORTS_NOTHING = ("gloo", "fake", "undefined")
_TRANSFORMER_ENGINE = {
    "transformer_engine.pytorch.module.base": "destroy_ub",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager.reset",
    "transformer_engine.pytorch.quantization": "FP8GlobalStateManager.reset",
}
_PERSISTENT_CHECKPOINTS = {"nvidia_resiliency_ext.checkpointing.async_ckpt.core": "abort_nvrx_checkpoint"}

_aborted: list[ProcessGroup] = []
"""Kept until the main thread is out of the function: if a DDP model held the last reference to a group of gloo, the
destructor would wait, with the GIL held, for a thread of the group that may wait for the GIL."""


class Abort(Callback):
    """Makes blocking calls of the function return or fail, so that the main thread can be interrupted."""


class AbortTorchDistributed(Abort):
    """Ends what runs in `torch.distributed` and destroys all process groups.

    NCCL's communicators are aborted, each in a thread of its own; gloo's connections are shut down, and so are those to
    the store at MASTER_PORT, for which a main thread inside `init_process_group` may wait. A wait in gloo ends with a
    RuntimeError. On the other side of the connection it ends when that side aborts, too, or when this one calls
    `gloo_connections.release`: the wrapper does as the next round begins.
    A main thread that is still on its way into a wait (its store looks up a name, or finds no server yet) is not
    freed: call again until it has been interrupted. Never freed are a `recv` from any source, which ends with its
    group's timeout, and gloo over ibverbs.

    Args:
        torch_fr_trace_path: folder for the Flight Recorder's dump, `iter_ITERATION/_dump_RANK` with the rank at entry;
            None: no dump. Recording is what TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE) turns on.
    """

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`. Can be called from any thread, with or without process groups, more than once."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available():
            return state
        if self.torch_fr_trace_path is not None and dist.is_initialized():
            path = Path(self.torch_fr_trace_path) / f"iter_{state.iteration}" / f"_dump_{state.initial_rank}"
            _run({"the Flight Recorder's dump": partial(_dump_flight_recorder, path)})
        groups = list(dist.distributed_c10d._world.pg_names)
        _run({f"abort of group {_name(group)}": partial(_abort, group) for group in groups})
        _run({"cutting connections": cut_connections})
        _forget_names()
        return state


class AbortTransformerEngine(Abort):
    """Frees the communication buffers (Userbuffers) of Transformer Engine and the process group its FP8 state keeps.

    Does nothing where the package was not imported. Put it before `AbortTorchDistributed` in a `Compose`, which then
    calls that first.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        _run(_loaded(_TRANSFORMER_ENGINE))
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the processes that write asynchronous checkpoints for nvidia_resiliency_ext and outlive a save.

    They are started again by the next save. Does nothing where that package's checkpointing was not imported.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        _run(_loaded(_PERSISTENT_CHECKPOINTS))
        return state


def forget_groups() -> None:
    """Resets `torch.distributed` to its state before the first group, so that all ranks use the same names again.

    A main thread that was inside `init_process_group` during the abort may have completed it since, or have taken a
    name for a group that was never made: then its next group waits without end for peers that count from 0. To be
    called in the main thread after its interruption, before the next round.
    """
    _forget_names()  # which keeps them as well
    _forget_hooks()
    # A group of gloo takes 10 ms to end, so that all end at once: each thread lets go of the last reference.
    # The number, too: an aborted group and one that was made meanwhile have the same name.
    held = [[group] for group in _aborted]
    _aborted.clear()
    _run({f"end of group {_name(holder[0])}, {number}": partial(_end, holder) for number, holder in enumerate(held)})


def _end(holder: list[ProcessGroup]) -> None:
    """Drops the reference to a group, and those to its backends once the group is destroyed.

    The destructor of a backend releases the GIL while it waits for the backend's threads. That of a group does not with
    torch 2.6: if it held the last reference to a backend, it would deadlock with a thread that waits for the GIL. A
    group can outlive this, through a model that the user keeps for instance; it then ends with its last reference.
    """
    group = holder.pop()
    backends = [group._get_backend(device) for device in group._device_types]
    # A finalizer keeps its arguments, and is called when the group's object has been destroyed.
    weakref.finalize(group, backends.clear).atexit = False


def _forget_names() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    _aborted.extend(dist.distributed_c10d._world.pg_names)
    if dist.is_initialized():
        _run({"destroy_process_group": dist.destroy_process_group})
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def _forget_hooks() -> None:
    """Removes torch's hooks for uncaught exceptions: with each default group torch wraps the present one in another.

    After 1,000 restarts an uncaught exception would end in a RecursionError.
    """
    hook = sys.excepthook
    while isinstance(hook, FunctionType) and hook.__qualname__ == _HOOK:
        captured = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        if "old_hook" not in captured:
            return
        hook = sys.excepthook = captured["old_hook"].cell_contents


def _name(group: ProcessGroup) -> str:
    """The name of a process group in the log."""
    return f"{group.group_name} ({group.group_desc})"


def _abort(group: ProcessGroup) -> None:
    import torch
    from torch import distributed as dist

    for served in dist.get_backend_config(group).split(","):
        device, _, kind = served.partition(":")
        if kind not in _ABORTS_NOTHING:
            backend = group._get_backend(torch.device(device))
            getattr(backend, "wrapped_pg", backend).abort()


def cut_again() -> None:
    """Cuts connections again; to be called while the main thread has not ended its function.

    It may have entered a wait since, after a name lookup for instance; or it is making a group of gloo, and waits for a
    peer whose connection was cut before it had sent its number.
    """
    cut_connections()
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal():
        gloo_connections.stand_in_for_peers(int(size))


def cut_connections() -> None:
    """Ends waits for peers and for the round's store, by shutting down their connections."""
    left = gloo_connections.cut_gloo()
    port = os.environ.get("MASTER_PORT", "")
    if port.isdecimal():
        gloo_connections.cut_store(int(port))
    for what in left:
        _log.warning("abort: %s", what)


def _dump_flight_recorder(path: Path) -> None:
    import torch
    from torch._C import _distributed_c10d as c10d

    if torch.cuda.is_initialized():
        name = "_dump_nccl_trace"
    else:
        name = "_dump_fr_trace"
    dump = getattr(c10d, name, None)
    if dump is None:
        raise RuntimeError(f"torch {torch.__version__} has none here (no {name})")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump(includeStackTraces=False))  # stacks need the GIL, which the main thread may never release


def _loaded(functions: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    """The functions whose module was imported and has them. `functions` maps modules to names in them."""
    found: dict[str, Callable[[], Any]] = {}
    for module, function in functions.items():
        try:
            found[f"{module}.{function}"] = attrgetter(function)(sys.modules[module])
        except (KeyError, AttributeError):
            pass
    return found


def _run(steps: Mapping[str, Callable[[], Any]]) -> None:
    """Calls each step in a thread of its own, for at most `_STEP_S`; logs those that fail or go on for longer."""
    calls = {what: in_thread(partial(_attempt, what, step), what) for what, step in steps.items()}
    wait(calls.values(), _STEP_S)
    for what, call in calls.items():
        if not call.done():
            _log.warning("abort: %s took longer than %g s", what, _STEP_S)


def _attempt(what: str, step: Callable[[], Any]) -> None:
    try:
        step()
    except Exception as error:
        _log.warning("abort: %s: %s: %s", what, type(error).__name__, error)
