"""Measures the look-ups of names that torch makes in ranks when they form process groups, and says how to mend slow
ones.

`validate.py` calls `findings`. A slow resolver is hard to find otherwise: each restart takes seconds longer, and
nothing says why. A rank that is started by exec looks up its own address for each store, and gloo looks up the name of
the host.

Threads: each look-up runs in a thread of its own, since the C library's functions cannot be interrupted. A thread whose
look-up takes too long is left behind.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rank_monitor.contract.processes import resolver

_SLOW_S = 0.1
"""Seconds from which on a look-up is reported: a whole restart on one node takes about that long."""
_LIMIT_S = 2.0
"""Seconds that `validate` waits for all look-ups. Where a resolver never answers, a rank waits for 10 s; a user who
only asks for the settings should not."""
_PEER = "::ffff:127.0.0.1"
"""The address whose name is looked up where a client of torch's store has connected to 127.0.0.1: torch uses IPv6
sockets."""
_OWN_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where this variable names an interface, gloo does not look up the name of the host."""


@dataclass(frozen=True)
class _LookUp:
    """A look-up that ranks make.

    Attributes:
        what: what is looked up.
        who: which ranks wait for it.
        mend: what makes it fast.
        make: makes the look-up, and blocks for it.
    """

    what: str
    who: str
    mend: str
    make: Callable[[], object]


def findings(environ: Mapping[str, str]) -> list[str]:
    """Makes the look-ups. Returns a sentence on each slow one. Blocks for `_LIMIT_S` at most."""
    name = socket.gethostname()
    made = [
        _LookUp(
            f"the name of {_PEER}",
            "ranks that are started by exec, and all with torch before 2.9, wait so long for each store",
            f"A line '{_PEER} localhost' in /etc/hosts, or a resolver that answers, ends that",
            lambda: socket.getnameinfo((_PEER, 0, 0, 0), socket.NI_NUMERICSERV),
        )
    ]
    if _OWN_INTERFACE not in environ:
        made.append(
            _LookUp(
                f"the address of this host's name {name}",
                "each rank waits so long for a group of gloo",
                f"A line with {name} in /etc/hosts, or {_OWN_INTERFACE}, ends that",
                lambda: socket.getaddrinfo(name, None),
            )
        )
    took = _durations([look_up.make for look_up in made])
    return [
        f"to look up {look_up.what} took {_text(seconds)}: {look_up.who}. {look_up.mend}"
        for look_up, seconds in zip(made, took, strict=True)
        if seconds > _SLOW_S
    ]


def _text(seconds: float) -> str:
    """Returns a duration in words."""
    if seconds >= _LIMIT_S:
        return f"more than {_LIMIT_S:g} s"
    return f"{seconds:.1f} s"


def _durations(calls: list[Callable[[], object]]) -> list[float]:
    """Makes the calls at the same time. Returns how many seconds each took; one that still runs: how many so far."""
    began = time.monotonic()
    ended: dict[int, float] = {}

    def run(number: int, call: Callable[[], object]) -> None:
        try:
            with resolver.usual():
                call()
        except OSError:
            pass  # an unknown name is no finding, only the time that the answer takes
        ended[number] = time.monotonic()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + _LIMIT_S - time.monotonic()))
    return [ended.get(number, time.monotonic()) - began for number in range(len(calls))]
