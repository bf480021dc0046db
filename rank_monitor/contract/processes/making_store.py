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
from collections.abc import Iterator

MENDED_IN = "2.7"
"""The first torch whose constructor enters the object with the interpreter's lock (pytorch/pytorch#143598)."""
MAX_WAIT_S = 0.5
"""Seconds to wait for another thread. A constructor takes milliseconds; one that takes longer waits in the network, up
to minutes where a host is lost, and nobody else may be held up by that. Below 1 s: `store_connection.py` gives a check
of 1 s, made while another thread hangs, 2 s in all."""
_making = threading.Lock()


@contextlib.contextmanager
def making_store() -> Iterator[None]:
    """A context in which to make one store of torch. The caller has imported torch. Must not be nested.

    Blocks for up to 0.5 s while another thread is in the context. Does nothing from torch 2.7 on.
    """
    if sys.modules["torch"].__version__ >= MENDED_IN:
        yield
        return
    is_held = _making.acquire(timeout=MAX_WAIT_S)
    try:
        yield
    finally:
        if is_held:
            _making.release()
