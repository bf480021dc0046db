"""Has torch's worker server answer this rank's monitor, which asks for the flight recorder when a rank may hang.
`bootstrap.py` calls it before the script.

The server is a thread in C++: it answers also while the main thread holds the GIL. It is started once the script has
imported torch.distributed, on a socket in the run's private folder, never on a port. Nothing here may keep the script
from running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ft_client.start.after_import import after_import
from rank_monitor.contract import env

_IN_C = "torch._C._distributed_c10d"
_ERROR = 2
"""c10's level of log lines: 0 info, 1 warning, 2 error. The server says at level 1 that it listens."""


def answer_after_import() -> None:
    """Starts the server once torch.distributed is imported, if the launcher named a socket."""
    path = os.environ.get(env.FLIGHT_RECORDER_SOCKET)
    if path:
        after_import("torch.distributed.distributed_c10d", lambda module: _serve(path))


def _serve(path: str) -> None:
    kind = getattr(sys.modules.get(_IN_C), "_WorkerServer", None)
    if kind is None:  # a torch without it
        return
    # A rank of an earlier cycle had the same path.
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108  (pathlib costs each rank 4 ms at its start)
    with (
        contextlib.suppress(Exception),
        _without_warnings(sys.modules["torch"]),
    ):
        server = kind(path)
        # Never freed: its destructor would write a line at each exit of a rank.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


@contextlib.contextmanager
def _without_warnings(torch: ModuleType) -> Iterator[None]:
    """Context in which c10 logs errors only.

    Raises:
        OSError, ValueError: this torch has no such level; nothing may be started then, since it would be seen.
    """
    folder = os.path.dirname(str(torch.__file__))  # noqa: PTH120
    level: Any = ctypes.c_int.in_dll(ctypes.CDLL(f"{folder}/lib/libc10.so"), "FLAGS_caffe2_log_level")
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before
