"""The thread that works on the user's folders, so that the agent's thread never does: journal, logs, the log file.

A file system may stop answering: a file server that is away, a FUSE server that is stopped. A call on it then returns
when it answers again, and no signal but SIGKILL ends it; while it is being served not even that. So such calls are
works of this thread, in order, from a queue that is bounded. Who needs a result waits for it within a limit.

Made by `composition.py`, one for each job. Any thread may call its methods.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TextIO, TypeVar

from ft_launcher.record.journal.contained import log_contained

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

STALLED_S = 0.5
"""Seconds that one work may take before nobody waits for those after it any more. A slow disk takes tenths."""
_LOOK_S = 0.1
"""Seconds between two looks whether the work before stands still."""
_MAX_TASKS = 1000
"""Works that wait: copies of stacks, say. Lines of the journal are one work, and bounded by their bytes."""


class NoAnswer(OSError):
    """A work has no result in time: the file system does not answer, and the work is done when it does; or the work was
    not taken."""


class FileThread:
    """Does works in order, in a thread of its own that starts with the first one. A work that raises is logged.

    In a fork of the process, which has no such thread, works are done in the caller's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self._is_said = False
        self._is_closed = False

    @property
    def is_stalled(self) -> bool:
        """Whether the present work takes longer than a file system that answers."""
        since = self._busy_since
        return since is not None and time.monotonic() - since >= STALLED_S

    def submit(self, task: Callable[[], object]) -> bool:
        """Appends a work. Does not block. Returns False where too many wait, or no thread starts: it is not done."""
        return not self._refused(task)

    def _refused(self, task: Callable[[], object]) -> str:
        """Appends a work; returns why that cannot be done, empty: it is done."""
        if os.getpid() != self._pid:
            _contain(task)
            return ""
        with self._changed:
            if self._is_closed:
                return "the run is over, and nothing is written or read for it any more"
            if len(self._tasks) >= _MAX_TASKS:
                return f"the file system does not answer, and {_MAX_TASKS} writes and reads wait for it already"
            self._tasks.append(task)
            if self._thread is None:
                thread = threading.Thread(target=self._run, daemon=True, name="ft_files")
                try:
                    thread.start()
                except RuntimeError as error:  # the system has none left; the next work tries again
                    self._tasks.pop()
                    return f"the thread that writes and reads files cannot be started: {error}"
                self._thread = thread
            self._changed.notify_all()
        return ""

    def call(self, task: Callable[[], _T], limit_s: float) -> _T:
        """Returns the result of a work, which is done after those before it. Waits `limit_s` seconds at most.

        Raises:
            NoAnswer: it is not done yet, or not taken.
            Exception: what `work` raised.
        """
        results: list[_T] = []
        errors: list[Exception] = []
        is_begun, is_done = threading.Event(), threading.Event()

        def run() -> None:
            is_begun.set()
            try:
                results.append(task())
            except Exception as error:  # handed to the caller's thread
                errors.append(error)
            finally:
                is_done.set()

        refused = self._refused(run)
        if refused:
            raise NoAnswer(refused)
        deadline = time.monotonic() + limit_s
        while not is_done.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or (self.is_stalled and not is_begun.is_set()):
                break
        if errors:
            raise errors[0]
        if results:
            return results[0]
        self.warn_stalled()
        if is_begun.is_set():
            raise NoAnswer(f"the file system has not answered within {limit_s:g} s")
        raise NoAnswer("the file system does not answer: an earlier write or read still waits for it")

    def flush(self, limit_s: float) -> bool:
        """Waits until all works are done, `limit_s` seconds at most; returns whether they are."""
        if os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self._is_idle() and not self.is_stalled and time.monotonic() < deadline:
                self._changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            is_done = self._is_idle()
        if self.is_stalled:
            self.warn_stalled()
        elif not is_done:
            # Not known yet: a disk may be slow for a moment.
            later = threading.Timer(STALLED_S, self._say_if_stalled)
            later.daemon = True
            with contextlib.suppress(RuntimeError):  # the system has no thread left, and the line is all that is lost
                later.start()
        return is_done

    def _say_if_stalled(self) -> None:
        if self.is_stalled:
            self.warn_stalled()

    def warn_stalled(self) -> None:
        """Says, once until it answers again, that the file system does not answer."""
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "the file system of the journal or the logs does not answer: the training goes on without them, and "
                "they are written when it does"
            )

    def close(self, limit_s: float) -> None:
        """Ends the thread after the works that wait. Waits `limit_s` seconds at most, then leaves it behind."""
        is_done = self.flush(limit_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if is_done and self._thread is not None:
            self._thread.join(limit_s)

    def _is_idle(self) -> bool:
        return not self._tasks and self._busy_since is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._busy_since = time.monotonic()
            _contain(task)
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
            if self._is_said:
                self._is_said = False
                logger.warning("the file system of the journal or the logs answers again")


class FileHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 cannot subscript it
    """Writes log lines to a file, in the thread of files. Lines that find too many works waiting are dropped."""

    def __init__(self, file: TextIO, files: FileThread) -> None:
        super().__init__(file)
        self._files = files
        self._is_closed = False

    def emit(self, record: logging.LogRecord) -> None:
        """See base class. After `close` it does nothing."""
        if self._is_closed:
            return
        try:
            text = self.format(record) + self.terminator
        except Exception:  # as the base class: a line that cannot be formatted ends nothing
            self.handleError(record)
            return
        self._files.submit(partial(self._write, text))

    def close(self) -> None:
        """Has the thread of files close the file, after the lines that wait. To be called before `FileThread.close`.

        Closing a file may wait for the file system as well, and a file that nobody closes is closed by whichever thread
        drops it last: in `launch()` one of the user's.
        """
        super().close()
        if not self._is_closed:
            self._is_closed = True
            self._files.submit(self._close_file)

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk: the same lines are on the console
            self.stream.write(text)
            self.stream.flush()

    def flush(self) -> None:
        """Does nothing: each line is flushed when it is written, and Python calls this at the end of the process."""


def _contain(task: Callable[[], object]) -> None:
    try:
        task()
    except Exception as error:  # the thread's edge
        log_contained("a file cannot be written", error)
