"""Runs a function as the rank's main program: receives it from the agent, calls it, sends back what it returned.

The Python API of the launcher starts such ranks, as torch's `elastic_launch` does. A fork that has the function already
gets it as `entry`; any other process receives it from the agent.

Why it is safe to unpickle what is received is explained in `rank_monitor/contract/wire/sealed_pickle.py`. The pickle is
read as multiprocessing reads what it sends to a new process: first this process is made like the caller's, then the
function is loaded. Of monitoring, this file knows one thing: a rank is not watched any more when its function has
returned.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import sys
from collections.abc import Callable
from multiprocessing import process, spawn
from types import TracebackType
from typing import Any

from ft_client.rank.start.script import below, forget_bootstrap
from rank_monitor.contract.wire import sealed_pickle


class Function:
    """The function to be run: one of the two kinds of `script.Main`.

    Args:
        channel: to the agent; closed when the function has returned.
        entry: the function and its arguments, if this process has them already; None: the agent sends them.
    """

    def __init__(self, channel: socket.socket, entry: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        self._channel, self._source, self._entry = channel, channel, entry
        os.set_inheritable(channel.fileno(), False)

    @classmethod
    def from_agent(cls, descriptor: int, pickle_at: int | None = None) -> Function:
        """Returns a function that is yet to be received, in a process that has done nothing else so far.

        Args:
            descriptor: of the channel to the agent.
            pickle_at: descriptor from which to receive the function instead, in a rank that had received it and was
                started again by exec.
        """
        function = cls(socket.socket(fileno=descriptor))
        if pickle_at is not None:
            function._source = socket.socket(fileno=pickle_at)
        return function

    def load_program(self) -> Callable[[], object]:
        """Returns the callable that runs the function."""
        return self.run

    def run(self) -> None:
        """Runs the function, and sends what it returned to the agent. Blocks until both are done.

        What the function raises is raised here, with our frames at the top of the traceback: see `below`.

        Raises:
            TypeError: what the function returned cannot be pickled.
        """
        function, args = self._entry or self._unpack()
        value = None
        try:
            value = function(*args)
        except SystemExit as wish:
            if wish.code:
                raise
        _end_watch()
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            kind = type(value).__qualname__
            raise TypeError(f"the function returned a {kind} that cannot be sent back: {error}") from None
        with contextlib.suppress(ConnectionError):  # the agent ends this cycle
            sealed_pickle.send(self._channel, data)
        self._channel.close()

    def below(self, trace: TracebackType | None) -> TracebackType | None:
        """Returns the part of a traceback that is the function's: what is below our frames."""
        return below(trace, {Function.run.__code__})

    def _unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Receives the function and its arguments from the agent. Blocks. Exits where the agent is gone.

        Before the function is unpickled, this process is made like the caller's (`multiprocessing.spawn.prepare`).

        Raises:
            Exception: what importing the caller's modules raises.
        """
        data = sealed_pickle.receive(self._source)
        if self._source is not self._channel:
            self._source.close()
        if data is None:
            sys.exit("ft_client: the launcher is gone")
        forget_bootstrap()
        stream = io.BytesIO(data)
        setattr(process.current_process(), "_inheriting", True)  # noqa: B010 (multiprocessing's own mark)
        try:
            spawn.prepare(pickle.load(stream))
            entry: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.load(stream)
        finally:
            delattr(process.current_process(), "_inheriting")
        return entry


def _end_watch() -> None:
    """Ends the watch: the training is over, and the launcher limits what follows."""
    module = sys.modules.get("ft_client.rank_monitor_client")
    if module:
        client = module.RankMonitorClient.active
    else:
        client = None
    if client is not None:
        client.shutdown_workload_monitoring()
