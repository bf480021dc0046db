"""A function as the entry point of ranks (`launch()`): its check, its pickle, and how a copied process becomes a rank.

Which code runs first in a rank depends on the start method:
- `fork` and `forkserver`: multiprocessing makes the process as a copy, and `become_rank` runs in it first.
- `spawn`: a new process (or a fork of the zygote) runs the client's bootstrap, which receives what `send` has sent.

`function_context.py` starts the ranks with these functions, in the launcher; `check` is called by `python_api.py`
before the job begins. Uses torch's underscored `_maybe_wrap_with_numa_binding`, in the rank.
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
    """A function with a `__name__`, `__qualname__` and `module`.

    torch reads the name of each entry point, and a `functools.partial` or a callable object has none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        self.__name__: str = getattr(named, "__qualname__", type(named).__qualname__)
        self.__qualname__ = self.__name__
        self.module: str = getattr(named, "__module__", "")

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        return self.function(*args)

    def __repr__(self) -> str:
        return f"{self.module}:{self.__name__}"


def check(entry: FunctionEntry, args: Sequence[Any]) -> None:
    """Checks that a function and its arguments can be sent to a process that is not a fork of this one.

    Without this check the error would appear in each rank, after the rendezvous.

    Raises:
        ConfigError: the function or an argument cannot be pickled, or cannot be imported there; the text says which
            of them, and why.
    """
    # The preparation data has the file or the module name of `__main__`, unless there is none (an interactive session).
    # Then the new process cannot import the function's module.
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

    The rank need not run yet: `connection` keeps the message.

    Raises:
        OSError: there is no memory for the message.
    """
    sealed_pickle.send(
        connection, *sealed_pickle.pack(_preparation() | {"tracker": sealed_pickle.Tracker()}, (function, args))
    )


def _preparation() -> dict[str, Any]:
    """Returns multiprocessing's preparation data (`sys.path`, the main module, ...) for a new process.

    Does not fix the start method of this process, which `get_preparation_data` does: the user's program may set its own
    method later.
    """
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    found: dict[str, Any] = spawn.get_preparation_data(process.current_process().name)
    if chosen is None:
        multiprocessing.set_start_method(None, force=True)
        del found["start_method"]
    return found


def bound(function: Callable[..., Any], local_rank: int, binding: Any) -> Callable[..., Any]:
    """Returns the function with torch's binding to processors around it (`--numa-binding`).

    Args:
        function: what the rank is to call.
        local_rank: of the rank, which is the number of its device.
        binding: torch's options for the binding; None: the function is returned as it is.
    """
    if binding is None:
        return function
    return functools.partial(_bound, function, local_rank, binding)


def _bound(function: Callable[..., Any], local_rank: int, binding: Any, *args: Any) -> Any:
    """Binds this process, and calls the function. Runs in the rank: torch's wrapper itself cannot be pickled."""
    from torch.numa.binding import _maybe_wrap_with_numa_binding

    device = _device(_maybe_wrap_with_numa_binding, local_rank)
    return _maybe_wrap_with_numa_binding(function, **device, numa_options=binding)(*args)


def _device(wrap: Callable[..., Any], local_rank: int) -> dict[str, int]:
    """Returns torch's argument for the device, as a keyword: `gpu_index` until torch 2.13, `device_index` in 2.15."""
    if "device_index" in inspect.signature(wrap).parameters:
        name = "device_index"
    else:
        name = "gpu_index"
    return {name: local_rank}


@dataclass(frozen=True)
class CopiedRank:
    """What a copied process needs to become a rank.

    Attributes:
        environ: variables to add to the environment of the copy.
        outputs: number of a stream (1 or 2) -> the file that it goes to.
        held: the descriptors that the user's program had open before the launch, which a fork keeps; None: the process
            is no fork of the launcher (`forkserver`), and has none of the launcher's descriptors.
        agent: pid of the launcher.
        by_lines: whether each line is to be written at once, because the launcher reads what the rank prints. Python's
            own streams hold back 8 KiB for a file.
    """

    environ: Mapping[str, str]
    outputs: Mapping[int, str]
    held: Collection[int] | None
    agent: int
    by_lines: bool = False


def become_rank(order: CopiedRank, channel: socket.socket, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Turns the process that multiprocessing started into a rank, and runs the rank's function in it.

    Args:
        order: what the process becomes.
        channel: the socket on which the return value is sent to the launcher.
        function: the user's function.
        args: its arguments.
    """
    # Each rank has a session of its own: a stop finds its processes by the session, and Ctrl-C in the terminal reaches
    # the launcher alone, which passes it on.
    os.setsid()
    if order.held is not None:
        _detach_from_agent(order.held, channel.fileno())
        fork_server.end_with_parent(order.agent)
    for number, path in order.outputs.items():
        # Both streams may go to one file, so neither may overwrite the other.
        mode = os.O_APPEND
        # A rank that is started again within a cycle goes on in the file of its predecessor.
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
    # A stop finds this process by the job's tag in /proc.
    proc_view.show(sys.orig_argv, os.environ)
    from ft_client import bootstrap  # Imported here, in the rank: the launcher itself does not know the client.

    bootstrap.run_function(channel, function, args)


def _detach_from_agent(held: Collection[int], channel: int) -> None:
    """Closes the descriptors that the launch opened, and restores the signal handlers, in a fork of the launcher.

    Monitors detect the launcher's death by the end of these descriptors, which must therefore be open in no rank.
    """
    # A garbage collection in this process would run destructors of objects that belong to the launcher.
    gc.freeze()
    signals.restore_handlers_in_child()
    parent = multiprocessing.parent_process()
    kept = {*held, channel}
    if parent:
        kept.add(parent.sentinel)
    for descriptor in fork_server.open_descriptors() - kept:
        os.close(descriptor)
