"""A function as the entry point of ranks: its check, its sealed pickle, and how a copied process becomes a rank.

By fork and forkserver multiprocessing makes the process, and `become_rank` runs in it first. A process that was started
for the rank (spawn) runs the client's bootstrap, which reads the pickle. Uses torch's underscored
`_maybe_wrap_with_numa_binding`, in the rank.
"""

from __future__ import annotations

import functools
import gc
import inspect
import io
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process, spawn
from typing import Any

from ft_launcher.node.processes import proc_view, signals
from ft_launcher.node.zygote import fork_server
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.wire import sealed_pickle

START_METHODS = ("spawn", "fork", "forkserver")
_SOURCE = "launch()"
_HINT = "Define it at the top of a module or script; start_method='fork' takes everything"


class FunctionEntry:
    """Wraps a function with a `__name__`: torch reads that of each entry point, and a partial has none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        self.__name__: str = getattr(named, "__qualname__", type(named).__qualname__)
        self.__qualname__ = self.__name__
        self.module: str = getattr(named, "__module__", "")

    def __call__(self, *args: Any) -> Any:
        """Calls it."""
        return self.function(*args)

    def __repr__(self) -> str:
        return f"{self.module}:{self.__name__}"


def check(entry: FunctionEntry, args: Sequence[Any]) -> None:
    """Checks that a function and its arguments can be sent to a process that is not a fork of this one.

    Raises:
        ConfigError: one of them cannot be pickled or imported there; the text says which, and why.
    """
    # Without a file or module name of `__main__` in it, the new process cannot import the function's module.
    if entry.module == "__main__" and not any(key.startswith("init_main") for key in _preparation()):
        problem = "is defined where no other process can import it (an interactive session)"
        raise ConfigError("function", entry.__name__, _SOURCE, problem, _HINT)
    for what, value, part in (("function", entry.__name__, entry.function), ("arguments", args, tuple(args))):
        try:
            sealed_pickle.pack(part)
        except Exception as error:
            problem = f"cannot be sent to the ranks: {error}"
            raise ConfigError(what, value, _SOURCE, problem, _HINT) from None


def send(connection: socket.socket, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Sends a rank its function and arguments, after multiprocessing's preparation data for a new process.

    Raises:
        OSError: there is no memory for it.
    """
    sealed_pickle.send(
        connection, *sealed_pickle.pack(_preparation() | {"tracker": sealed_pickle.Tracker()}, (function, args))
    )


def _preparation() -> dict[str, Any]:
    """Returns multiprocessing's preparation data, without fixing the start method of this process."""
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    found: dict[str, Any] = spawn.get_preparation_data(process.current_process().name)
    if chosen is None:
        # `get_preparation_data` fixes the default method; a user's program may set its own later.
        multiprocessing.set_start_method(None, force=True)
        del found["start_method"]
    return found


def bound(function: Callable[..., Any], local_rank: int, binding: Any) -> Callable[..., Any]:
    """Returns the function, with torch's binding to processors around it. `binding`: its options; None: no binding."""
    if binding is None:
        return function
    return functools.partial(_bound, function, local_rank, binding)


def _bound(function: Callable[..., Any], local_rank: int, binding: Any, *args: Any) -> Any:
    from torch.numa.binding import _maybe_wrap_with_numa_binding

    device = _device(_maybe_wrap_with_numa_binding, local_rank)
    return _maybe_wrap_with_numa_binding(function, **device, numa_options=binding)(*args)


def _device(wrap: Callable[..., Any], local_rank: int) -> dict[str, int]:
    """Returns torch's argument for the device: `gpu_index` until torch 2.13, `device_index` in 2.15."""
    if "device_index" in inspect.signature(wrap).parameters:
        name = "device_index"
    else:
        name = "gpu_index"
    return {name: local_rank}


@dataclass(frozen=True)
class CopiedRank:
    """What a copied process becomes.

    `held`: the caller's descriptors from before the launch; None: not a fork. `by_lines`: what it prints is read on the
    way, so each line is to be written at once; Python's own streams would hold back 8 KiB for a file.
    """

    environ: Mapping[str, str]
    outputs: Mapping[int, str]
    held: Collection[int] | None
    agent: int
    by_lines: bool = False


def become_rank(order: CopiedRank, channel: socket.socket, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Makes the process that multiprocessing started a rank and runs its function in it."""
    # As every rank: a stop finds its processes by the session, and Ctrl-C goes through the launcher.
    os.setsid()
    if order.held is not None:
        _let_go_of_the_agent(order.held, channel.fileno())
        fork_server.end_with_parent(order.agent)
    for number, path in order.outputs.items():
        # Both streams may go to one file.
        mode = os.O_APPEND
        if env.REJOIN not in order.environ:
            mode |= os.O_TRUNC
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(order.environ)
    if order.by_lines:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
    # The job's tag in /proc is how a stop finds this process.
    proc_view.show(sys.orig_argv, os.environ)
    from ft_client import bootstrap  # here: it is not the agent's to know

    bootstrap.run_function(channel, function, args)


def _let_go_of_the_agent(held: Collection[int], channel: int) -> None:
    """Closes the descriptors that the launch opened: monitors detect the launcher's death by the end of these."""
    # A collection here would run destructors of objects that belong to the launcher.
    gc.freeze()
    signals.let_go_in_child()
    parent = multiprocessing.parent_process()
    kept = {*held, channel}
    if parent:
        kept.add(parent.sentinel)
    for descriptor in fork_server.open_descriptors() - kept:
        os.close(descriptor)
