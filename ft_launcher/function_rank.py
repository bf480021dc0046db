"""A function as the entry point of ranks: whether it can travel, its parcel, and how a copied process becomes a rank.

By fork and forkserver multiprocessing makes the process, and `become_rank` runs in it first. A process that was started
for the rank (spawn) runs the client's bootstrap, which takes the parcel. Uses torch's underscored
`_maybe_wrap_with_numa_binding`, in the rank.
"""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process, spawn
from typing import Any

from ft_launcher import proc_view, signals, zygote
from rank_monitor.contract import env, parcel
from rank_monitor.contract.errors import ConfigError

START_METHODS = ("spawn", "fork", "forkserver")
_SOURCE = "launch()"
_HINT = "Define it at the top of a module or script; start_method='fork' takes everything"


class Entry:
    """A function by a name of its own: torch asks each entry point for `__name__`, and a partial has none."""

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


def check(entry: Entry, args: Sequence[Any]) -> None:
    """That a function and its arguments can be sent to a process of another start than fork.

    Raises:
        ConfigError: they cannot; it says which, and why.
    """
    if entry.module == "__main__" and not any(key.startswith("init_main") for key in _preparation()):
        problem = "is defined where no other process can import it (an interactive session)"
        raise ConfigError("function", entry.__name__, _SOURCE, problem, _HINT)
    for what, value, part in (("function", entry.__name__, entry.function), ("arguments", args, tuple(args))):
        try:
            parcel.pack(part)
        except Exception as error:
            problem = f"cannot be sent to the ranks: {error}"
            raise ConfigError(what, value, _SOURCE, problem, _HINT) from None


def send(connection: socket.socket, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Sends a rank what it runs, after what multiprocessing tells a new process of this one.

    Raises:
        OSError: there is no memory for it.
    """
    parcel.send(connection, *parcel.pack(_preparation() | {"tracker": parcel.Tracker()}, (function, args)))


def _preparation() -> dict[str, Any]:
    """multiprocessing's, without the start method that asking for it would settle for this process."""
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    found: dict[str, Any] = spawn.get_preparation_data(process.current_process().name)
    if chosen is None:
        multiprocessing.set_start_method(None, force=True)
        del found["start_method"]
    return found


def bound(function: Callable[..., Any], local_rank: int, numa: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, bound to processors in its rank as torch does it, where `numa` has torch's `numa_options`."""
    return functools.partial(_bound, function, local_rank, numa) if numa else function


def _bound(function: Callable[..., Any], local_rank: int, numa: Mapping[str, Any], *args: Any) -> Any:
    from torch.numa.binding import _maybe_wrap_with_numa_binding

    return _maybe_wrap_with_numa_binding(function, **_device(_maybe_wrap_with_numa_binding, local_rank), **numa)(*args)


def _device(wrap: Callable[..., Any], local_rank: int) -> dict[str, int]:
    """The argument that names the device: `gpu_index` until torch 2.13, `device_index` in 2.15."""
    name = "device_index" if "device_index" in inspect.signature(wrap).parameters else "gpu_index"
    return {name: local_rank}


@dataclass(frozen=True)
class CopiedRank:
    """What a copied process takes on. `held`: descriptors of the caller from before the launch, by fork only."""

    environ: Mapping[str, str]
    outputs: Mapping[int, str]
    held: Collection[int] | None
    agent: int


def become_rank(order: CopiedRank, channel: socket.socket, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs in the process that multiprocessing made."""
    os.setsid()
    if order.held is not None:
        _let_go_of_the_agent(order.held, channel.fileno())
        zygote.end_with_parent(order.agent)
    for number, path in order.outputs.items():
        how = os.O_APPEND if env.REJOIN in order.environ else os.O_TRUNC
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(order.environ)
    proc_view.show(sys.orig_argv, os.environ)
    from ft_client import bootstrap  # here: it is not the agent's to know

    bootstrap.run_function(channel, function, args)


def _let_go_of_the_agent(held: Collection[int], channel: int) -> None:
    """Closes what the launch opened: while a copy is open, nobody sees that the launcher was killed."""
    gc.freeze()
    signals.let_go_in_child()
    parent = multiprocessing.parent_process()
    kept = {*held, channel, *([parent.sentinel] if parent else ())}
    for descriptor in zygote.open_descriptors() - kept:
        os.close(descriptor)
