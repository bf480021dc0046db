"""What frees a main thread that is blocked in a call. Runs in another thread; knows nothing of the restart.

Nothing here raises: what could not be freed is logged, and the limits of the wrapper decide. Every step has a thread
and a deadline of its own, since the calls that free others can hang themselves. Uses underscored names of torch: the
list of process groups and their count, the backend of a group, the Flight Recorder's dump and the hook for uncaught
exceptions have no public ones.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Thread
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ft_client.group import cut as cut_agreements
from ft_client.inprocess import connections
from ft_client.inprocess.callback import Callback
from ft_client.inprocess.state import FrozenState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)

_STEP_S = 20.0
_HOOK = "init_process_group.<locals>._distributed_excepthook"
_ABORTS_NOTHING = ("gloo", "fake", "undefined")
_TRANSFORMER_ENGINE = {
    "transformer_engine.pytorch.module.base": "destroy_ub",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager.reset",
    "transformer_engine.pytorch.quantization": "FP8GlobalStateManager.reset",
}
_PERSISTENT_CHECKPOINTS = {"nvidia_resiliency_ext.checkpointing.async_ckpt.core": "abort_nvrx_checkpoint"}

_aborted: list[ProcessGroup] = []
"""Kept until the main thread is out of the function: were a DDP model there the last to let go of a group of gloo, its
end would wait, with the GIL held, for a thread of the group that may wait for the GIL."""


class Abort(Callback):
    """Makes blocking calls of the function return or fail, so that the main thread can be interrupted."""


class AbortTorchDistributed(Abort):
    """Ends what runs in `torch.distributed` and destroys all process groups.

    NCCL's communicators are aborted, each in a thread of its own; gloo's connections are shut down, and so are those
    by which ranks of one host agree, and those to the store at MASTER_PORT, for which a main thread inside
    `init_process_group` may wait. Whoever waits in gloo gets a RuntimeError; on the other side of the connection too,
    where nobody aborts, once `forget_groups` was called here.
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
        if (dist := sys.modules.get("torch.distributed")) is None or not dist.is_available():
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

    Does nothing where the package was not imported. In a `Compose`, it stands before `AbortTorchDistributed`, which
    is thus called first.
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
    """Leaves `torch.distributed` as it was before the first group, for all ranks to begin again with the same names.

    A main thread that was on its way through `init_process_group` during the abort may have come to its end since, or
    have taken a name for a group that never was: then its next group waits for ever for peers that count from 0. Who
    has interrupted a main thread calls this in it, before the next iteration.
    """
    _forget_names()  # which keeps them as well
    _forget_hooks()
    # A group of gloo takes 10 ms to end, so that all end at once: each thread lets go of the last reference.
    # The number: an aborted group and one that came meanwhile have the same name.
    held = [[group] for group in _aborted]
    _aborted.clear()
    connections.let_go()
    _run({f"end of group {_name(holder[0])}, {number}": partial(_end, holder) for number, holder in enumerate(held)})


def _end(holder: list[ProcessGroup]) -> None:
    """Lets go of a group, and of its backends once the group is gone.

    The destructor of a backend releases the GIL while it waits for the backend's threads. That of a group does not with
    torch 2.6: were it the last to hold a backend, it would wait for ever for a thread that waits for the GIL. A group
    can outlive this, by a model that the user keeps for instance, and ends in whatever thread then lets go of it.
    """
    group = holder.pop()
    backends = [group._get_backend(device) for device in group._device_types]
    # A finalizer keeps its arguments, and is called when the group's object has been destroyed.
    weakref.finalize(group, backends.clear).atexit = False


def _forget_names() -> None:
    if (dist := sys.modules.get("torch.distributed")) is None or not dist.is_available():
        return
    _aborted.extend(dist.distributed_c10d._world.pg_names)
    if dist.is_initialized():
        _run({"destroy_process_group": dist.destroy_process_group})
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def _forget_hooks() -> None:
    """Takes back the hooks for uncaught exceptions: with each default group torch puts one more around those there are.

    After 1,000 restarts an uncaught exception would end in a RecursionError.
    """
    hook = sys.excepthook
    while isinstance(hook, FunctionType) and hook.__qualname__ == _HOOK:
        captured = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        if "old_hook" not in captured:
            return
        hook = sys.excepthook = captured["old_hook"].cell_contents


def _name(group: ProcessGroup) -> str:
    """What a process group is called in the log."""
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
    """To be called while the main thread does not arrive. It was on its way into a wait, in a name lookup for instance;
    or a group of gloo is being made, and waits for a peer whose connection was cut before it had said whose it is."""
    cut_connections()
    if (size := os.environ.get("WORLD_SIZE", "")).isdecimal():
        connections.stand_in_for_peers(int(size))


def cut_connections() -> None:
    """Ends waits for peers and for the iteration's store."""
    cut_agreements()
    left = connections.cut_gloo()
    if (port := os.environ.get("MASTER_PORT", "")).isdecimal():
        connections.cut_store(int(port))
    for what in left:
        _log.warning("abort: %s", what)


def _dump_flight_recorder(path: Path) -> None:
    import torch
    from torch._C import _distributed_c10d as c10d

    name = "_dump_nccl_trace" if torch.cuda.is_initialized() else "_dump_fr_trace"
    if (dump := getattr(c10d, name, None)) is None:
        raise RuntimeError(f"torch {torch.__version__} has none here (no {name})")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump(includeStackTraces=False))  # stacks need the GIL, which the main thread may never release


def _loaded(functions: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    """Those functions whose module was imported and has them; `functions` maps modules to names in them."""
    found: dict[str, Callable[[], Any]] = {}
    for module, function in functions.items():
        try:
            found[f"{module}.{function}"] = attrgetter(function)(sys.modules[module])
        except (KeyError, AttributeError):
            pass
    return found


def _run(steps: Mapping[str, Callable[[], Any]]) -> None:
    """Calls each step in a thread of its own, for at most `_STEP_S`; logs those that fail or go on for longer."""
    threads = [Thread(target=_attempt, args=step, name=step[0], daemon=True) for step in steps.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _STEP_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            _log.warning("abort: %s took longer than %g s", thread.name, _STEP_S)


def _attempt(what: str, step: Callable[[], Any]) -> None:
    try:
        step()
    except Exception as error:
        _log.warning("abort: %s: %s: %s", what, type(error).__name__, error)
