"""Writes the stacks of all threads of this process to its stack file, for its monitor.

`process.py` makes a `StackWriter` in each rank. There are two ways:

- **By a message.** The monitor sends `StacksAsked`, and the watchdog calls `write`. `faulthandler` then walks the
  frames while the watchdog holds the GIL: no other thread executes Python meanwhile, so no frame changes.
- **By a signal**, which faulthandler handles in C, whatever the interrupted thread does. This also works while a thread
  holds the GIL and never gives it up, which stops the watchdog. But the handler does not hold the GIL: a thread that
  executes Python changes its frames, and frees the memory of those it has left, under the handler's hands. The handler
  then reads freed memory, and the rank dies of SIGSEGV. So the monitor sends the signal only where
  `rank_monitor/stack_signal.py` allows it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import stat
import sys
import threading
from collections.abc import Mapping

from rank_monitor.contract import env
from rank_monitor.contract.processes.descriptor import moved_up
from rank_monitor.contract.wire.messages import END_OF_STACKS

_CUT = b"...\n"
"""How a dump of faulthandler ends that has left out threads: all after the hundredth."""
_MAY_BE_CUT = 50
"""Threads with a frame, from which on a dump may have been cut: faulthandler also counts threads without one, such as
those of torch's autograd."""
_MAX_FRAMES = 100
"""Frames of a thread in a dump, as faulthandler has it (MAX_FRAME_DEPTH in CPython's traceback.c)."""


class StackWriter:
    """The open stack file of this process.

    Args:
        path: the file; it is made if it is missing.
        number: the signal on which faulthandler writes the stacks.

    Raises:
        OSError, ValueError, RuntimeError: the file cannot be opened, or the signal cannot be handled.
    """

    def __init__(self, path: str, number: int) -> None:
        self.signal = number
        self._path = path
        self._open()

    def write(self) -> None:
        """Appends the stacks of all threads to the file, and `END_OF_STACKS`. Holds the GIL for about 1 ms.

        Called in the watchdog's thread. faulthandler lists the newest thread first, and the main thread last; where the
        dump was cut before the main thread, this thread's frames are added. Where the file cannot be written, nothing
        is: the monitor then says that there was no answer.
        """
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if not self._is_open():
                self._open()
            faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
            end = END_OF_STACKS
            if len(sys._current_frames()) >= _MAY_BE_CUT and self._is_cut():
                end = main_thread() + END_OF_STACKS
            os.write(self._descriptor, end.encode(errors="replace"))

    def _open(self) -> None:
        """Opens the file, and has faulthandler write to it on the signal."""
        self._descriptor = moved_up(_opened(self._path))
        opened = os.fstat(self._descriptor)
        self._file = opened.st_dev, opened.st_ino
        faulthandler.register(self.signal, file=self._descriptor, all_threads=True, chain=False)

    def _is_cut(self) -> bool:
        """Returns whether the last dump in the file has left out threads."""
        size = os.fstat(self._descriptor).st_size
        return size > len(_CUT) and os.pread(self._descriptor, len(_CUT), size - len(_CUT)) == _CUT

    def _is_open(self) -> bool:
        """Returns whether the descriptor is still that of the file. A script may close all descriptors, and the number
        is then given to another file."""
        try:
            now = os.fstat(self._descriptor)
        except OSError:
            return False
        return self._file == (now.st_dev, now.st_ino)


def of_environment(environment: Mapping[str, str]) -> StackWriter | None:
    """Returns the writer for the file and the signal that the environment names; None: there are no stacks of this
    process, since it names none, or they cannot be used."""
    path, number = environment.get(env.STACK_FILE), environment.get(env.STACK_SIGNAL)
    if not path or not number:
        return None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return StackWriter(path, int(number))
    return None


def main_thread() -> str:
    """Returns the frames of the main thread in the format of faulthandler. For a dump that was cut before."""
    ident = threading.main_thread().ident or 0
    lines = [f"\nThread 0x{ident:016x} (most recent call first):\n"]
    frame = sys._current_frames().get(ident)
    while frame is not None and len(lines) <= _MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)


def _opened(path: str) -> int:
    """Returns a descriptor that appends to a regular file, which is made if it is missing.

    A rank of an earlier cycle may have put a FIFO or a link there, which is removed.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108  (pathlib costs each rank 4 ms at its start)
    return os.open(path, flags, 0o600)
