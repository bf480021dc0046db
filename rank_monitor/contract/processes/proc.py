"""Reads what the kernel reports of processes in /proc (proc(5)), for the monitor and the client, which have no psutil.

A process that is gone, or that this one may not read, has empty values; nothing is raised. Nothing blocks. Files are
opened by descriptor, since a first `Path` touches half a MiB of memory that a monitor shares with the template.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

_CHUNK = 1 << 16
"""Bytes of one read: most files of /proc then need one read, and the one that finds the end."""
_UTIME, _STIME = 11, 12
"""Where a thread's CPU times stand in its `stat`, in user and in system mode: in fields after the name of the command,
counted from 0."""
_BOOT = "/proc/sys/kernel/random/boot_id"
"""A random number of each boot (proc(5))."""


def pids() -> list[int]:
    """Returns the pids of all processes that this one can see."""
    # There may be thousands of entries: a Path each costs more than the reading.
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def environ(pid: int) -> bytes:
    """Returns the environment that a process was started with, each `NAME=VALUE` ended by a NUL. Later changes by the
    process do not show, and a zombie has none."""
    return _read(f"/proc/{pid}/environ")


def status(pid: int) -> dict[str, str]:
    """Returns the fields of a process's status by name: `State`, `Threads`, `SigCgt` and others."""
    lines = (line.partition(":") for line in _text(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, by SIGSTOP or a debugger; False when it is gone."""
    return status(pid).get("State", "").startswith(("T", "t"))


def catches(status_of: Mapping[str, str], number: int) -> bool:
    """Returns whether a process has a handler for a signal. False of a process that has ended.

    Args:
        status_of: of the process, as `status` returns it.
        number: of the signal.
    """
    # In the mask, bit n - 1 stands for signal n (proc(5)).
    return bool(int(status_of.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def waits_in(pid: int) -> str:
    """Returns the kernel function that the main thread waits in; empty if it runs, or the kernel does not tell."""
    found = _text(f"/proc/{pid}/wchan").strip()
    if found == "0":
        return ""
    return found


def kernel_stack(pid: int) -> list[str]:
    """Returns the main thread's stack in the kernel, innermost first; root alone may read it."""
    return [line.partition(" ")[2] for line in _text(f"/proc/{pid}/stack").splitlines() if line]


def threads(pid: int) -> dict[int, tuple[str, int]]:
    """Returns the state of each thread of a process, a letter as in proc(5), and the CPU time that it has used, in
    ticks of the kernel's clock (a hundredth of a second, as a rule); by the number of the thread. Takes 20 us for a
    thread."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 (as above)
            # The name of the command stands in brackets, and may have brackets itself.
            fields = _text(f"/proc/{pid}/task/{name}/stat").rpartition(")")[2].split()
            if len(fields) > _STIME:
                found[int(name)] = fields[0], int(fields[_UTIME]) + int(fields[_STIME])
    return found


def name_of(pid: int) -> str:
    """Returns the name of a process that `ps` and `top` show."""
    return _text(f"/proc/{pid}/comm").strip()


def name_this_process(name: str) -> None:
    """Sets the name that `ps` and `top` show. The kernel cuts it after 15 bytes (TASK_COMM_LEN)."""
    with contextlib.suppress(OSError):
        comm = os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(comm, name.encode())
        finally:
            os.close(comm)


def descriptors_of(pid: int) -> list[int]:
    """Returns the open descriptors of another process."""
    return _descriptors(f"/proc/{pid}/fd")


def sockets_of(pid: int) -> set[str]:
    """Returns the inodes of the sockets that another process has."""
    found = set()
    for number in descriptors_of(pid):
        with contextlib.suppress(OSError):  # the process has closed it meanwhile
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{number}").partition(":[")  # noqa: PTH115 (as above)
            if kind == "socket":
                found.add(inode.rstrip("]"))
    return found


def udp_tables(pid: int) -> list[str]:
    """Returns the kernel's tables of UDP sockets, for IPv4 and IPv6, of the network namespace that a process is in."""
    return [_text(f"/proc/{pid}/net/{name}") for name in ("udp", "udp6")]


def own_descriptors() -> list[int]:
    """Returns the open descriptors of this process. One of them, that of the listing itself, is closed again."""
    return _descriptors("/proc/self/fd")


def boot_id() -> bytes:
    """Returns a line that differs after each boot of this machine; empty where a sandbox does not show it."""
    return _read(_BOOT)


def _descriptors(folder: str) -> list[int]:
    """Returns the numbers of the entries of a folder `fd`; empty: the process is gone, or not this user's."""
    try:
        return [int(name) for name in os.listdir(folder)]  # noqa: PTH208 (as above)
    except OSError:
        return []


def _text(path: str) -> str:
    """Returns a file of /proc as text; bytes that are no UTF-8 are replaced."""
    return _read(path).decode(errors="replace")


def _read(path: str) -> bytes:
    """Returns the contents of a file of /proc; empty where it cannot be read. Such a file says nothing of its size, so
    it is read until its end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        part = os.read(descriptor, _CHUNK)
        while part:
            parts.append(part)
            part = os.read(descriptor, _CHUNK)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
