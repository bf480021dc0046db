"""Runs a function as the rank's main program: takes it from the agent, calls it, sends back what it returned.

How a parcel is safe to unpickle stands in `rank_monitor/contract/parcel.py`; it is read as multiprocessing reads what
it sends to a new process. Knows nothing of monitoring but that a function which returned is to be watched no more.
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

from ft_client.script import below, forget_bootstrap
from rank_monitor.contract import parcel


class Function:
    """What is to be run.

    Args:
        channel: to the agent; closed when the function has returned.
        given: the function and its arguments, where this process has them already; None: the agent sends them.
    """

    def __init__(self, channel: socket.socket, given: tuple[Callable[..., Any], tuple[Any, ...]] | None = None) -> None:
        self._channel, self._source, self._given = channel, channel, given
        os.set_inheritable(channel.fileno(), False)

    @classmethod
    def from_agent(cls, descriptor: int, parcel_at: int | None = None) -> Function:
        """The function that waits at a descriptor, in a process that is nothing else yet.

        Args:
            parcel_at: where its parcel waits instead, in a rank that took it and started again.
        """
        function = cls(socket.socket(fileno=descriptor))
        if parcel_at is not None:
            function._source = socket.socket(fileno=parcel_at)
        return function

    def take(self) -> Callable[[], object]:
        """What runs it."""
        return self.run

    def run(self) -> None:
        """Runs it. What it raises comes out, with our frames at the top of the traceback: see `below`.

        Raises:
            TypeError: what it returned cannot be pickled.
        """
        function, args = self._given or self._unpack()
        value = None
        try:
            value = function(*args)
        except SystemExit as wish:
            if wish.code:
                raise
        _watch_no_more()
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            kind = type(value).__qualname__
            raise TypeError(f"the function returned a {kind} that cannot be sent back: {error}") from None
        with contextlib.suppress(ConnectionError):  # the agent ends this cycle
            parcel.send(self._channel, data)
        self._channel.close()

    def below(self, trace: TracebackType | None) -> TracebackType | None:
        """The part of a traceback that is the function's: what is below our frames."""
        return below(trace, {Function.run.__code__})

    def _unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Takes the function from the agent, after this process was made like the caller's.

        Raises:
            Exception: whatever importing the caller's modules raises.
        """
        data = parcel.receive(self._source)
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


def _watch_no_more() -> None:
    """The training is over: what follows is the launcher's to limit."""
    module = sys.modules.get("ft_client.rank_monitor_client")
    client = module.RankMonitorClient.active if module else None
    if client is not None:
        client.shutdown_workload_monitoring()
