"""The level of torch's C++ log in this process, which no function of torch sets.

torch reads TORCH_CPP_LOG_LEVEL once, when it is imported, into a flag of its C++ library. Here that flag itself is set.
A process that was forked before keeps its own level. With a torch that has no such flag, nothing changes. The callers
pass the module torch, which nothing here may import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

LEVEL = "TORCH_CPP_LOG_LEVEL"
_FLAG = "FLAGS_caffe2_log_level"
"""The symbol of the flag in torch's C++ library c10."""
_FATAL = 3
"""The level of c10's log above INFO (0), WARNING (1) and ERROR (2)."""


def only_fatal(torch: ModuleType) -> None:
    """Makes torch's C++ code print nothing but what is fatal, in this process, from now on."""
    flag = _flag(torch)
    if flag is not None:
        flag.value = _FATAL


@contextmanager
def silent(torch: ModuleType) -> Iterator[None]:
    """A context in which torch's C++ code prints nothing but what is fatal.

    The flag is that of the process: other threads print nothing either, so the context should last milliseconds. For
    one thread at a time.
    """
    flag = _flag(torch)
    if flag is None:
        yield
        return
    before = flag.value
    flag.value = _FATAL
    try:
        yield
    finally:
        flag.value = before


@functools.cache
def _flag(torch: ModuleType) -> Any:
    """Returns the flag as a C int; None: this torch has none."""
    try:
        library = ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, _FLAG)
    except (OSError, ValueError):
        return None
