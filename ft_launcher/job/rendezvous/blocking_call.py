"""A call that may block for long and that nothing can cancel, as most of torch's on a store: in a thread of its own.

The caller waits for the end of the call by a descriptor, beside all else that it waits for, and leaves the call behind
where it must: after a signal to the launcher, for instance. The thread is a daemon, so that this process can end while
the call blocks. Knows nothing of what is called.

Used by `agent/ending_signal.py` for formations, health checks and the departure, and by the handlers that are not ours
(`guarded_handler.py`, `foreign.py`). An example, with a limit of 5 s:

    call = BlockingCall(store.read)
    try:
        if readable([call.fileno()], 5.0):
            return call.result()
    finally:
        call.close()
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from rank_monitor.contract.processes import resolver

_T = TypeVar("_T")


class BlockingCall(Generic[_T]):
    """One call, which begins at once.

    Args:
        work: what is called, without arguments. An exception of it reaches who asks for the result.
        name: the name of its thread.

    Raises:
        RuntimeError: the system starts no further thread.
    """

    def __init__(self, work: Callable[[], _T], name: str = "ft_blocking_call") -> None:
        # The thread closes its end when the call is done, which wakes a wait for the other one: an event, not a poll.
        self._done, at_work = os.pipe()
        outcome: Future[_T] = Future()
        self._outcome = outcome

        def run() -> None:
            try:
                # The launcher bounds its look-ups of names; the name of a host may take longer than that bound.
                with resolver.usual():
                    outcome.set_result(work())
            except BaseException as error:  # handed to the caller's thread
                outcome.set_exception(error)
            finally:
                os.close(at_work)

        try:
            threading.Thread(target=run, daemon=True, name=name).start()
        except RuntimeError:
            os.close(at_work)
            self.close()
            raise

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the call is done."""
        return self._done

    @property
    def is_done(self) -> bool:
        """Whether the call has returned or raised."""
        return self._outcome.done()

    def result(self) -> _T:
        """Returns what the call returned, or raises what it raised. Blocks until it is done."""
        return self._outcome.result()

    def close(self) -> None:
        """Closes the descriptor. A call that is not done is left behind: it goes on, and nobody receives its result."""
        os.close(self._done)
