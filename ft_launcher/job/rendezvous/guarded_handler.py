"""A rendezvous handler that is not ours, between it and the agent: torch's `etcd` and `etcd-v2`, or one of another
package.

Such a handler works on a store that may not answer for a minute or for ever, and was not written for several threads.
So one thread at a time uses it, and the launcher's main thread never waits for it beyond a signal.

Threads (`blocking_call.py`), each left behind where its call does not end:

    creation (`created`) and `shutdown`   called in the main thread, which starts a thread and waits for it or a signal
    `next_rendezvous`                     called in a thread of the agent already (`agent/ending_signal.py`)
    `num_nodes_waiting`                   called in a thread of `foreign.py`, which asks from time to time

A call that was left behind still has the turn: the next call waits for its end, up to `_TURN_S`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousTimeoutError

from ft_launcher.job.rendezvous.blocking_call import BlockingCall
from rank_monitor.contract.processes.wait import readable

_TURN_S = 600.0
"""Seconds until a call gives up its wait for an earlier one: torch's limit for a whole rendezvous. A request of torch's
etcd client ends after a minute, one of a TCPStore after five."""
_CLOSE_S = 30.0
"""Seconds for the shutdown: torch's limit for it in its own handler of c10d (`close_timeout`)."""
_CLOSE_AFTER_SIGNAL_S = 1.0
"""Seconds for the shutdown once a signal has arrived. A store that answers needs milliseconds, and other nodes wait for
its record."""


class EndingSignals(Protocol):
    """The signals that end the launcher: what a handler needs to know of them."""

    @property
    def arrived(self) -> Sequence[int]:
        """The numbers of those that were read, in order."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal has arrived."""

    def wait(self, limit_s: float) -> int | None:
        """Returns the first signal that is pending or arrives within `limit_s` seconds; None without one."""

    def why_ended(self, number: int) -> str:
        """Returns why a launcher ends that gets a signal, by the signal's name."""


class GuardedHandler(RendezvousHandler):  # type: ignore[misc]
    """A handler that is not ours, used by one thread at a time.

    An attribute that torch's interface does not name is that of the other handler. It is read without a turn.

    Args:
        handler: the one that is not ours.
        signals: to the launcher. They are waited for here, and read elsewhere, so that none is lost.
    """

    def __init__(self, handler: RendezvousHandler, signals: EndingSignals) -> None:
        self._handler = handler
        self._signals = signals
        self._in_use = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the ranks' store."""
        return bool(self._handler.use_agent_store)

    def get_backend(self) -> str:
        """The backend's name."""
        return str(self._handler.get_backend())

    def get_run_id(self) -> str:
        """The job's id."""
        return str(self._handler.get_run_id())

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next cycle's nodes, and before that for the end of an earlier question to the handler.

        Raises:
            RendezvousTimeoutError: the earlier question has no end.
        """
        with self._turn():
            return self._handler.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait to join. Blocks as long as the handler's store does."""
        with self._turn():
            return int(self._handler.num_nodes_waiting())

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed. Blocks as long as the handler's store does."""
        with self._turn():
            return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Closes the rendezvous. Blocks as long as the handler's store does."""
        with self._turn():
            self._handler.set_closed()

    def shutdown(self) -> bool:
        """Closes the rendezvous at the end of the job; returns whether that was done in time.

        Called by `agent/torch_launch.py` in the main thread. A signal shortens the wait: how the job ended is known.

        Returns False where the handler had not answered in time; its thread is left behind then.
        """
        call = BlockingCall(self._shut_down)
        try:
            if not self._signals.arrived:
                readable([call.fileno(), self._signals.fileno()], _CLOSE_S)
            if not call.is_done and (self._signals.arrived or readable([self._signals.fileno()], 0.0)):
                readable([call.fileno()], _CLOSE_AFTER_SIGNAL_S)
            return call.is_done and call.result()
        finally:
            call.close()

    def _shut_down(self) -> bool:
        with self._turn():
            return bool(self._handler.shutdown())

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Context of one call of the handler; waits for the end of the call before it.

        Raises:
            RendezvousTimeoutError: that call has no end.
        """
        if not self._in_use.acquire(timeout=_TURN_S):
            raise RendezvousTimeoutError(
                f"an earlier call of the rendezvous handler has not ended within {_TURN_S:g} s"
            )
        try:
            yield
        finally:
            self._in_use.release()


def created(create: Callable[[], RendezvousHandler], signals: EndingSignals) -> GuardedHandler:
    """Creates a handler, which connects to its store, and returns it guarded. Called in the main thread.

    Args:
        create: makes the handler, in a thread. Its exception is raised here.
        signals: to the launcher; the first one ends the wait.

    Raises:
        SignalException: a signal to the launcher arrived before the handler was there.
    """
    call = BlockingCall(create)
    try:
        readable([call.fileno(), signals.fileno()], None)
        number = signals.wait(0.0)
        if number is not None:
            raise SignalException(signals.why_ended(number), signal.Signals(number))
        return GuardedHandler(call.result(), signals)
    finally:
        call.close()
