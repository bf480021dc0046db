"""Keeps torch's C++ code from writing to the launcher's console. Called once, after torch is imported.

Each connection that breaks makes the launcher's stores print twenty lines and a C++ stack to standard error, straight
to the descriptor. The same arrives as a Python exception, which is reported in one line.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

import torch

_LEVEL = "TORCH_CPP_LOG_LEVEL"
# The symbol of the flag in torch's C++ library c10.
_FLAG = "FLAGS_caffe2_log_level"
_FATAL = 3
"""The level of c10's log above INFO (0), WARNING (1) and ERROR (2)."""


def quiet(environ: Mapping[str, str] = os.environ) -> None:
    """Shows only what is fatal, in this process, unless the user sets TORCH_CPP_LOG_LEVEL.

    torch reads that variable once, when it is imported, into a flag of its C++ library; processes forked before keep
    theirs. A torch without that flag goes on printing.
    """
    if _LEVEL in environ:
        return
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        # There is no call for it: the flag of the loaded library itself is set.
        ctypes.c_int.in_dll(library, _FLAG).value = _FATAL
    except (OSError, ValueError):
        pass
