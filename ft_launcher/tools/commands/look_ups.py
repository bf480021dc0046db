"""Measures the look-ups of names that torch makes in ranks while they form their groups, and says how slow ones are
mended. `validate.py` asks it. Blocks for as long as a resolver takes, and no longer than its limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rank_monitor.contract.processes import resolver

_SLOW_S = 0.1
"""A restart on one node takes that long."""
_LIMIT_S = 2.0
"""Seconds that `validate` waits for a look-up. With a resolver that never answers a rank waits for 10 s; a user who
only asks for the settings should not."""
_PEER = "::ffff:127.0.0.1"
"""What a client of torch's store has connected to where that is 127.0.0.1: torch's sockets are of IPv6."""
_OWN_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class _LookUp:
    """A look-up: of what, who makes it, what ends it, and the call that makes it."""

    what: str
    who: str
    mend: str
    make: Callable[[], object]


def findings(environ: Mapping[str, str]) -> list[str]:
    """Makes the look-ups. Returns a sentence on each that is slow."""
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
    if seconds >= _LIMIT_S:
        return f"more than {_LIMIT_S:g} s"
    return f"{seconds:.1f} s"


def _durations(calls: list[Callable[[], object]]) -> list[float]:
    """Makes calls at once, each in a thread. Returns how many seconds each took; one that goes on: so far."""
    began = time.monotonic()
    ended: dict[int, float] = {}

    def run(number: int, call: Callable[[], object]) -> None:
        try:
            with resolver.usual():
                call()
        except OSError:
            pass  # a name that nobody knows is no finding: how long that takes is
        ended[number] = time.monotonic()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + _LIMIT_S - time.monotonic()))
    return [ended.get(number, time.monotonic()) - began for number in range(len(calls))]
