"""Finds the addresses of hosts, and bounds how long look-ups of names take in this process. The bounds: glibc only.

torch's stores look up the name of each peer, for log lines (`peer_names.py`). Where no resolver answers, each of these
look-ups takes 10 s, in the server's only thread too. Launcher and client therefore make their stores within one of the
contexts below.

A bound on these look-ups must not reach others. A resolver that answers after 3 s works for a program, and would not
where RES_OPTIONS says `timeout:1`. So nothing is put into an environment. Instead the numbers are changed that glibc
has for each thread (`_res`), for as long as a context lasts. Where the user has set RES_OPTIONS, the user's bounds
hold, and nothing here changes them, with one exception: `unasked`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_VARIABLE = "RES_OPTIONS"
_BOUND = (1, 2)
"""The bound: seconds for an answer, and attempts."""
_USUAL = (5, 2)
"""glibc's defaults: RES_TIMEOUT and RES_DFLRETRY in resolv.h."""
_QUICK_S = 0.5
"""A look-up that takes less is quick: well above one in /etc/hosts or a cache, and below the shortest wait for a
resolver that does not answer, 1 s."""
_INITIALISED = 1
"""The flag RES_INIT: glibc has read resolv.conf for this thread."""
_REACH_S = 1.0
"""Seconds for a first connection to a known address. A host that takes longer is looked up again, which does no
harm."""
_known: dict[str, str] = {}
"""Name of a host -> its address at which a server was reached."""


class _State(ctypes.Structure):
    """The beginning of `struct __res_state`, the same since glibc 2.0."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


def bound_process() -> None:
    """Bounds the look-ups of all threads of this process, those of C++ too. To be called before any look-up.

    glibc reads RES_OPTIONS when it initialises its state, so the variable is set for that moment alone: the environment
    that children inherit is unchanged. The bound lasts until /etc/resolv.conf changes.
    """
    if _VARIABLE in os.environ or _libc() is None:
        return
    os.putenv(_VARIABLE, f"timeout:{_BOUND[0]} attempts:{_BOUND[1]}")
    try:
        _libc().__res_init()
    finally:
        os.unsetenv(_VARIABLE)


@contextmanager
def usual() -> Iterator[None]:
    """A context in which look-ups of this thread have glibc's own bounds: for names that the user has given."""
    with _lasting(_USUAL):
        yield


@contextmanager
def unasked() -> Iterator[None]:
    """A context in which no look-up of this thread asks a resolver: a name that /etc/hosts does not have fails at
    once."""
    with _with_numbers(_state_of_thread(), (_BOUND[0], 0)):
        yield


@contextmanager
def towards(host: str, port: int) -> Iterator[str]:
    """A context in which to make a client of torch's store at `host`. Gives the address to use, as `address_of`
    finds it.

    With an address, torch looks up nothing but the name of the peer, and that look-up is bounded.
    """
    address = address_of(host, port)
    with _lasting(_BOUND):
        yield address


def address_of(host: str, port: int) -> str:
    """Returns an address of `host`, if possible one at which a server listens at `port`. Blocks for look-ups, and for
    up to 1 s for each address that does not answer.

    A name is looked up once, and again where nobody listens at the address found before: so no restart waits for a
    resolver. A name that is not found is returned unchanged: the connection that follows then fails, and its error
    names the host.
    """
    if _is_address(host):
        return host
    known = _known.get(host)
    if known is not None and _listens(known, port):
        return known
    with usual():
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return host
    # IPv4 first, as in `local_address.py`.
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda address: ":" in address)
    for address in addresses:
        if _listens(address, port):
            _known[host] = address
            return address
    return addresses[0]


@contextmanager
def bounded_towards(*hosts: str) -> Iterator[None]:
    """A context in which look-ups of this thread are bounded, for connections that torch makes to these hosts by name.

    The names are looked up first. If one of them takes long, or is not found, nothing is bounded: torch's own look-up
    of that name would fail otherwise. Blocks for these look-ups.
    """
    with usual():
        if all(map(_is_found_quickly, hosts)):
            bound = _BOUND
        else:
            bound = _USUAL
    with _lasting(bound):
        yield


def _is_address(host: str) -> bool:
    """Returns whether a text is an address, and no name that would have to be looked up."""
    # Not `ipaddress`: a forked rank, which has this module from its zygote, would find that module imported.
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def _listens(address: str, port: int) -> bool:
    """Whether a server accepts a connection at an address within 1 s."""
    try:
        socket.create_connection((address, port), _REACH_S).close()
    except OSError:
        return False
    return True


def _is_found_quickly(host: str) -> bool:
    """Looks a name up. Returns whether it was found, and without waiting for a resolver."""
    began = time.monotonic()
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return time.monotonic() - began < _QUICK_S


@contextmanager
def _lasting(wanted: tuple[int, int]) -> Iterator[None]:
    """A context in which look-ups of this thread have these seconds and attempts, unless the user has set
    RES_OPTIONS."""
    if _VARIABLE in os.environ:
        state = None
    else:
        state = _state_of_thread()
    with _with_numbers(state, wanted):
        yield


@contextmanager
def _with_numbers(state: Any, wanted: tuple[int, int]) -> Iterator[None]:
    """A context in which `state` has these seconds and attempts; None: nothing is changed."""
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = wanted
    try:
        yield
    finally:
        state.retrans, state.retry = before


def _state_of_thread() -> Any:
    """Returns glibc's resolver state of this thread, initialised; None with another C library."""
    libc = _libc()
    if libc is None:
        return None
    state = libc.__res_state().contents
    if not state.options & _INITIALISED:
        libc.__res_init()
    return state


@functools.cache
def _libc() -> Any:
    """Returns the C library; None if it has not glibc's resolver."""
    libc = ctypes.CDLL(None)
    try:
        libc.__res_state.restype = ctypes.POINTER(_State)
        libc.__res_init.restype = ctypes.c_int
    except AttributeError:
        return None
    return libc
