"""Frees a main thread that is blocked in a collective, or in the making of a group. Knows nothing of the restart.

`restart/user_function.py` calls the user's abort after a fault, and `cut_again` while the main thread has not come out
of the function; the user chooses the abort, `AbortTorchDistributed()` by default. Nothing here raises: what could not
be freed is logged, and the limits of the monitor apply.

Threads: an abort runs in a thread beside the blocked main thread. Each step of an abort has one more thread, and a
deadline, since the calls that free others can hang themselves; a thread that exceeds the deadline is left behind. The
main thread calls `reset_groups`, when it is out of the function.

This file uses underscored names of torch: the list of process groups and their count, the backend of a group, the
Flight Recorder's dump and the hook for uncaught exceptions have no public ones.
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

_STEP_S = 20.0
"""Seconds for one step. Below the defaults of soft_timeout (60 s) and hard_timeout (90 s), so that the next step runs
in time although one hangs."""
_HOOK = "init_process_group.<locals>._distributed_excepthook"
"""The qualified name of torch's hook for uncaught exceptions."""
_ABORTS_NOTHING = ("gloo", "fake", "undefined")
"""Backends whose `abort` does nothing. The connections of gloo are shut down instead."""
_TRANSFORMER_ENGINE = {
    "transformer_engine.pytorch.module.base": "destroy_ub",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager.reset",
    "transformer_engine.pytorch.quantization": "FP8GlobalStateManager.reset",
}
"""Module of Transformer Engine -> the function in it that frees what an abort must free. Newer versions have the FP8
state in `quantization`."""
_PERSISTENT_CHECKPOINTS = {"nvidia_resiliency_ext.checkpointing.async_ckpt.core": "abort_nvrx_checkpoint"}
"""Module of NVIDIA's extension -> its function that ends the checkpoint processes."""

_aborted: list[ProcessGroup] = []
"""Groups that were aborted, kept until the main thread is out of the function. If a DDP model held the last reference
to a group of gloo, the group's destructor would wait, with the GIL held, for a thread of the group that may be waiting
for the GIL."""


class Abort(Callback):
    """Makes blocking calls of the function return or fail, so that the main thread can be interrupted.

    The base class of aborts. Called in a thread beside the main thread, for at most `hard_timeout`.
    """


class AbortTorchDistributed(Abort):
    """Ends what runs in `torch.distributed` and destroys all process groups.

    - NCCL's communicators are aborted, each in a thread of its own.
    - Gloo's connections are shut down: a wait in gloo then ends with a RuntimeError. On the other side of a connection
      a wait ends when that side aborts, too, or when this side calls `gloo_connections.close_cut`, which the wrapper
      does as the next round begins.
    - Connections to the store at MASTER_PORT are shut down: a main thread inside `init_process_group` may wait there.

    A main thread that is still on its way into a wait is not freed: its store may be looking up a name, or may find no
    server yet. So the abort must be repeated until the main thread has been interrupted (`cut_again`). Two waits are
    never freed: a `recv` from any source, which ends with its group's timeout, and gloo over ibverbs.

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
        _reset_names()
        return state


class AbortTransformerEngine(Abort):
    """Frees the communication buffers (Userbuffers) of Transformer Engine and the process group its FP8 state keeps.

    Does nothing where the package was not imported. In a `Compose` it stands before `AbortTorchDistributed`, as in
    `Compose(AbortTransformerEngine(), AbortTorchDistributed())`: a `Compose` calls the last callback first.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        _run(_loaded(_TRANSFORMER_ENGINE))
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the processes that write asynchronous checkpoints for nvidia_resiliency_ext and outlive a save.

    The next save starts them again. Does nothing where that package's checkpointing was not imported.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        _run(_loaded(_PERSISTENT_CHECKPOINTS))
        return state


def reset_groups() -> None:
    """Resets `torch.distributed` to its state before the first group, so that all ranks use the same names again.

    A main thread that was inside `init_process_group` during the abort may have completed the group since, or have
    taken a name for a group that was never made. Then its next group would have another name than on the other ranks,
    and wait without end for them. Called in the main thread after its interruption, before the next round.
    """
    _reset_names()
    _reset_hooks()
    # A group of gloo takes 10 ms to end, so all end at once, each in a thread that drops the last reference. A step is
    # named by a number, too: an aborted group and one that was made meanwhile may have the same name.
    held = [[group] for group in _aborted]
    _aborted.clear()
    _run({f"end of group {_name(holder[0])}, {number}": partial(_end, holder) for number, holder in enumerate(held)})


def _end(holder: list[ProcessGroup]) -> None:
    """Drops the reference to a group, and those to its backends once the group is destroyed.

    The destructor of a backend releases the GIL while it waits for the backend's threads. The destructor of a group
    does not, with torch 2.6: if the group held the last reference to a backend, it would deadlock with a thread that
    waits for the GIL. A group can outlive this function, through a model that the user keeps for instance; it then
    ends with its last reference.
    """
    group = holder.pop()
    backends = [group._get_backend(device) for device in group._device_types]
    # A finalizer keeps its arguments, and is called when the group's object has been destroyed.
    weakref.finalize(group, backends.clear).atexit = False


def _reset_names() -> None:
    """Destroys all process groups of torch, and resets its count of groups. Keeps the groups in `_aborted`."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    _aborted.extend(dist.distributed_c10d._world.pg_names)
    if dist.is_initialized():
        _run({"destroy_process_group": dist.destroy_process_group})
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def _reset_hooks() -> None:
    """Removes torch's hooks for uncaught exceptions.

    With each default group torch wraps the present hook in another one. After 1,000 restarts an uncaught exception
    would end in a RecursionError in the place of its traceback.
    """
    hook = sys.excepthook
    while isinstance(hook, FunctionType) and hook.__qualname__ == _HOOK:
        captured = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        if "old_hook" not in captured:
            return
        hook = sys.excepthook = captured["old_hook"].cell_contents


def _name(group: ProcessGroup) -> str:
    """Returns the name of a process group for the log."""
    return f"{group.group_name} ({group.group_desc})"


def _abort(group: ProcessGroup) -> None:
    """Aborts all backends of a group that can be aborted. Blocks while NCCL ends what runs on the device."""
    import torch
    from torch import distributed as dist

    for served in dist.get_backend_config(group).split(","):
        device, _, kind = served.partition(":")
        if kind not in _ABORTS_NOTHING:
            backend = group._get_backend(torch.device(device))
            getattr(backend, "wrapped_pg", backend).abort()


def cut_again() -> None:
    """Cuts connections again. Called at growing intervals while the main thread has not ended its function.

    Since the first cut the main thread may have entered a wait, after a name lookup for instance. Or it is making a
    group of gloo, and waits for a peer whose connection was cut before the peer had sent its number: then a connection
    in the peer's place ends the wait.
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
    """Writes torch's Flight Recorder of this process into a file: what each group was doing, before it is aborted."""
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
    # Stacks need the GIL, which a main thread that hangs in C may never release.
    path.write_bytes(dump(includeStackTraces=False))


def _loaded(functions: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    """Returns the functions whose module was imported and has them, by their full names.

    Args:
        functions: module -> the name of a function in it.
    """
    found: dict[str, Callable[[], Any]] = {}
    for module, function in functions.items():
        try:
            found[f"{module}.{function}"] = attrgetter(function)(sys.modules[module])
        except (KeyError, AttributeError):
            pass
    return found


def _run(steps: Mapping[str, Callable[[], Any]]) -> None:
    """Calls all steps at once, each in a thread of its own. Waits for them for at most `_STEP_S` in all.

    Logs the steps that failed, and those that go on for longer.
    """
    calls = {what: in_thread(partial(_attempt, what, step), what) for what, step in steps.items()}
    wait(calls.values(), _STEP_S)
    for what, call in calls.items():
        if not call.done():
            _log.warning("abort: %s took longer than %g s", what, _STEP_S)


def _attempt(what: str, step: Callable[[], Any]) -> None:
    """Calls a step. Logs what it raises: the next step of the abort is to run all the same."""
    try:
        step()
    except Exception as error:
        _log.warning("abort: %s: %s: %s", what, type(error).__name__, error)
