"""Has torch's stores in this process look up no names of peers.

A client of torch's store looks up the name of the address that it has connected to, for its log lines; so does each
further client that a process group makes. /etc/hosts seldom has the name of `::ffff:127.0.0.1`, so a resolver is asked:
in a new process, or in the next round of an in-process restart, before anything else goes on. Where no resolver
answers, each look-up takes 10 s.

torch from 2.9 on asks no more in a process in which such a look-up has failed once, nor in the forks of that process.
So one look-up is made to fail on purpose: by a store of torch's on the loopback interface, in a context in which no
resolver is asked.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from types import ModuleType

from rank_monitor.contract.processes import local_address, resolver, torch_log

_KNOWS_FAILURES = "2.9"
"""The first torch that looks up no names after a failure."""
_LIMIT = timedelta(seconds=5)
"""For a connection within this process. torch's own default is five minutes."""


@functools.cache
def look_up_no_more(torch: ModuleType) -> None:
    """Has torch's first look-up fail at once and without its warning. Takes 2 ms, once in a process and its forks.

    Does nothing with an older torch, with another C library than glibc, and where /etc/hosts has the name. No look-up
    of names that lead to addresses is changed.

    The server does without libuv. libuv makes a pipe for its signals, once in a process, and a handler of forks that
    closes the two descriptors of that pipe in each child. A rank, which is a fork of the zygote, closes all descriptors
    of the zygote; files of the rank then get the same numbers, and each child of the rank would lose two of its files.

    Args:
        torch: the module, which nothing here may import; its part `distributed` has been imported.
    """
    if torch.__version__ < _KNOWS_FAILURES:
        return
    host = local_address.loopback()
    try:
        listener = local_address.listening(host, 0)
        with torch_log.silent(torch), resolver.unasked():
            torch.distributed.TCPStore(
                host_name=host,
                port=listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=_LIMIT,
                master_listen_fd=listener.detach(),
                use_libuv=False,
            )
    except (OSError, RuntimeError, TypeError, ValueError):
        # No loopback interface, no descriptors, a torch without one of these arguments: look-ups stay as they are.
        pass
