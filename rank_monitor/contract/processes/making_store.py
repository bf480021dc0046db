"""The context in which a thread makes a store of torch while other threads of the process may make one, too.

The constructor of `TCPStore` gives up the interpreter's lock. Before torch 2.7 it also entered the new object into
pybind11's table of objects without that lock (https://github.com/pytorch/pytorch/issues/143593). Where two threads did
so at once, the table was damaged, and the process was aborted: "pybind11_object_dealloc(): Tried to deallocate
unregistered instance!".

Launcher, standalone agent and client make their TCPStores in this context. They make a PrefixStore in it as well, which
enters itself into the same table. The end of a store is not covered: it removes an entry from the table at any moment,
but takes about a microsecond. Two constructors coincide more often, since a server answers its clients at once.

To be removed with the support of torch 2.6.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

MENDED_IN = "2.7"
"""The first torch whose constructor enters the object with the interpreter's lock (pytorch/pytorch#143598)."""
MAX_STAY_S = 5.0
"""Seconds after which a thread in the context counts as hanging, and the next one enters. A constructor takes
milliseconds, and a few seconds where the server itself waits for a resolver that does not answer. Threads that wait for
one server must not all be let in meanwhile: the server would answer them all at once. A thread that stays longer waits
in the network, up to minutes where a host is lost, and nobody else may be held up by that."""
_changed = threading.Condition()
_inside: tuple[object, float] | None = None
"""The thread in the context that entered last, and when it did, by the monotonic clock."""


@contextlib.contextmanager
def making_store(max_stay_s: float = MAX_STAY_S) -> Iterator[None]:
    """A context in which to make one store of torch. The caller has imported torch. Must not be nested.

    Blocks while another thread is in the context, but not once that thread has been there for `max_stay_s` seconds.
    Does nothing from torch 2.7 on.
    """
    if sys.modules["torch"].__version__ >= MENDED_IN:
        yield
        return
    stay = _enter(max_stay_s)
    try:
        yield
    finally:
        _leave(stay)


def _enter(max_stay_s: float) -> object:
    """Waits for a turn, and returns what `_leave` wants."""
    global _inside
    stay = object()
    with _changed:
        while _inside is not None:
            left_s = _inside[1] + max_stay_s - time.monotonic()
            if left_s <= 0:
                break
            _changed.wait(left_s)
        _inside = stay, time.monotonic()
    return stay


def _leave(stay: object) -> None:
    """Ends a turn; changes nothing where the next thread did not wait for that."""
    global _inside
    with _changed:
        if _inside is not None and _inside[0] is stay:
            _inside = None
            _changed.notify()
