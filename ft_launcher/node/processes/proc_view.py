"""Sets the command line and the environment that /proc shows of this process.

Used by the zygote, and in each rank that is a fork: a fork goes on showing what the program it was forked from was
started with. Two readers would be misled. `ps` would list each rank as the zygote or the launcher. And a stop finds
processes of the job by the job's tag in /proc/PID/environ (`process_tree.py`), which a fork of the launcher lacks.

`PR_SET_MM_MAP` (Linux 3.18, no privilege needed) sets the addresses from which the kernel reads both. On a kernel
without it nothing changes: a rank is found by its pid all the same, and what it started by its ancestors.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

# From linux/prctl.h.
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# -1 as the unsigned `exe_fd` of struct prctl_mm_map: /proc/PID/exe stays as it is.
_NO_EXE = 0xFFFFFFFF
_FROM_STAT = (26, 27, 45, 46, 47, 28)
"""Fields of /proc/PID/stat (counted from 1, proc(5)) in the order of `struct prctl_mm_map`: start and end of the code,
start and end of the data, start of the heap, start of the stack. Not the end of the heap, which sbrk(0) gives."""

_shown: list[mmap.mmap] = []
"""The memory that the kernel reads whenever somebody reads /proc. It must never be freed, so it is kept here."""


def show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Sets what /proc/PID/cmdline and /proc/PID/environ of this process show. Ignores a refusal of the kernel.

    Changes neither `sys.argv` nor `os.environ`.
    """
    # Both texts as the kernel has them: one block of memory, each argument and each variable ended by a zero.
    shown_command = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    length = len(shown_command) + len(variables)
    memory = mmap.mmap(-1, max(1, length), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:length] = shown_command + variables
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    between, last = first + len(shown_command), first + length
    code, code_end, data, data_end, heap, stack = _layout()
    own = (code, code_end, data, data_end, heap, _libc().sbrk(0), stack)
    # All other addresses are handed over unchanged. No auxiliary vector (address and size 0): the kernel keeps its own.
    layout = struct.pack("11QQII", *own, first, between, between, last, 0, 0, _NO_EXE)
    if _libc().prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, len(layout), 0) == 0:
        _shown.append(memory)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Returns the C library. `sbrk` gets its types here: ctypes would cut an address to 32 bits."""
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
    return libc


@functools.cache
def _layout() -> tuple[int, ...]:
    """Returns the addresses of code, data, heap and stack. Cached across forks: a fork has those of its parent."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return tuple(int(fields[number - 3]) for number in _FROM_STAT)
