"""Runs a function as the rank's main program: receives it from the agent, calls it, sends back what it returned.

Why it is safe to unpickle what is received is in `rank_monitor/contract/wire/sealed_pickle.py`; it is read as
multiprocessing reads what it sends to a new process. Of monitoring it only knows that a rank is not watched any more
when its function has returned.
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
    """The function to be run.

    Args:
        channel: to the agent; closed when the function has returned.
        entry: the function and its arguments, if this process has them already; None: the agent sends them.
    """

    def __init__(self, channel: socket.socket, entry: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        self._channel, self._source, self._entry = channel, channel, entry
        os.set_inheritable(channel.fileno(), False)

    @classmethod
    def from_agent(cls, descriptor: int, pickle_at: int | None = None) -> Function:
        """The function that is to be received from a descriptor, in a process that has done nothing else yet.

        Args:
            pickle_at: descriptor from which to receive it instead, in a rank that received it before and was started
                again by exec.
        """
        function = cls(socket.socket(fileno=descriptor))
        if pickle_at is not None:
            function._source = socket.socket(fileno=pickle_at)
        return function

    def prepare_program(self) -> Callable[[], object]:
        """Returns what runs the function."""
        return self.run

    def run(self) -> None:
        """Runs the function. What it raises is raised here, with our frames at the top of the traceback: see `below`.

        Raises:
            TypeError: what it returned cannot be pickled.
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
        """The part of a traceback that is the function's: what is below our frames."""
        return below(trace, {Function.run.__code__})

    def _unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Receives the function from the agent. Before it is unpickled, this process is made like the caller's.

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
            taken: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.load(stream)
        finally:
            delattr(process.current_process(), "_inheriting")
        return taken


def _end_watch() -> None:
    """Ends the watch: the training is over, and the launcher limits what follows."""
    module = sys.modules.get("ft_client.rank_monitor_client")
    if module:
        client = module.RankMonitorClient.active
    else:
        client = None
    if client is not None:
        client.shutdown_workload_monitoring()
