"""Bounds how long look-ups of names take in this process, unless the user has set RES_OPTIONS. glibc only.

torch's stores look up the name of each peer, for log lines. Where no resolver answers, each of these look-ups takes
10 s, in the server's only thread too. A bound on them must not reach other look-ups: a resolver that answers after 3 s
works for a program, and no longer does where RES_OPTIONS says `timeout:1`. So nothing is put into an environment: glibc
reads the variable once for a process, at the first look-up, and has numbers of its own for each thread (`_res`).
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
"""Seconds for an answer, and attempts."""
_USUAL = (5, 2)
"""glibc's defaults (RES_TIMEOUT, RES_DFLRETRY in resolv.h)."""
# Well above a look-up in /etc/hosts or a cache, and below the shortest wait for a resolver that does not answer, 1 s.
_QUICK_S = 0.5
_INITIALISED = 1  # RES_INIT


class _State(ctypes.Structure):
    """The beginning of `struct __res_state`, the same since glibc 2.0."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


def bound_process() -> None:
    """Bounds the look-ups of all threads of this process, those of C++ too. To be called before any look-up.

    The environment that children inherit is unchanged. The bound lasts until /etc/resolv.conf changes.
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
    """A context in which look-ups of this thread are not bounded."""
    with _lasting(_USUAL):
        yield


@contextmanager
def bounded_towards(*hosts: str) -> Iterator[None]:
    """A context in which look-ups of this thread are bounded, for connections of torch to these hosts.

    They are not bounded if one of these names itself takes long, or is not found.
    """
    with usual():
        if all(map(_is_found_quickly, hosts)):
            bound = _BOUND
        else:
            bound = _USUAL
    with _lasting(bound):
        yield


def _is_found_quickly(host: str) -> bool:
    began = time.monotonic()
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return time.monotonic() - began < _QUICK_S


@contextmanager
def _lasting(wanted: tuple[int, int]) -> Iterator[None]:
    if _VARIABLE in os.environ:
        state = None
    else:
        state = _state_of_thread()
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
    """glibc's resolver state of this thread, initialised; None with another C library."""
    libc = _libc()
    if libc is None:
        return None
    state = libc.__res_state().contents
    if not state.options & _INITIALISED:
        libc.__res_init()
    return state


@functools.cache
def _libc() -> Any:
    """The C library; None if it has not glibc's resolver."""
    libc = ctypes.CDLL(None)
    try:
        libc.__res_state.restype = ctypes.POINTER(_State)
        libc.__res_init.restype = ctypes.c_int
    except AttributeError:
        return None
    return libc
