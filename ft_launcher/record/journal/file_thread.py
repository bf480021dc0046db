"""A thread that does all work on the user's folders, so that the agent's thread never waits for a disk.

A file system may stop answering: a file server is away, a FUSE server is stopped. A call on it then returns only when
the file system answers again. No signal but SIGKILL ends the call, and while a request is being served not even that.
So journal, logs and the log file hand each such call to this thread as a task. Tasks are done in order, from a bounded
queue. A caller that needs the result waits for it within a limit, and goes on without it.

Threads: `ft_files` runs the tasks; it starts with the first one. Any thread may call the methods. `submit` does not
block; `call`, `flush` and `close` block up to the limit that they are given. `composition.py` makes one `FileThread`
for each job and passes it to all that write or read there.
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
"""Seconds that one task may take before the file system counts as stalled, and nobody waits for later tasks any more. A
slow disk takes tenths of a second."""
_LOOK_S = 0.1
"""Seconds between two checks of a waiting caller whether the task before its own is stalled."""
_MAX_TASKS = 1000
"""Tasks that may wait: copies of stacks, say. All queued lines of the journal are one task, bounded by their bytes."""


class NoAnswer(OSError):
    """A task has no result in time. Either the file system does not answer, and the task is done once it does; or the
    task was not accepted. The text says which."""


class FileThread:
    """Does tasks in order, in a thread of its own. A task that raises is logged, and the next one follows.

    A fork of the process has no such thread: there each task is done at once, in the thread of its caller.
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
        """Whether the present task takes longer than `STALLED_S`: the file system does not answer."""
        since = self._busy_since
        return since is not None and time.monotonic() - since >= STALLED_S

    def submit(self, task: Callable[[], object]) -> bool:
        """Appends a task and returns at once. Returns False if the task will not be done: too many tasks wait, no
        thread can be started, or `close` was called."""
        return not self._refused(task)

    def _refused(self, task: Callable[[], object]) -> str:
        """Appends a task. Returns the reason why it was not accepted; empty: it was."""
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
                except RuntimeError as error:  # the system has no thread left; the next task tries again
                    self._tasks.pop()
                    return f"the thread that writes and reads files cannot be started: {error}"
                self._thread = thread
            self._changed.notify_all()
        return ""

    def call(self, task: Callable[[], _T], limit_s: float) -> _T:
        """Has the thread do a task after all earlier ones, and returns its result. Blocks for `limit_s` seconds at
        most.

        The task is done even if nobody waits for it any more. So it must not leave anything behind that only a waiting
        caller would remove.

        Raises:
            NoAnswer: the task is not done yet, or was not accepted.
            Exception: what the task raised.
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
        """Waits until all tasks are done; returns whether they are. Blocks for `limit_s` seconds at most, and not at
        all while the file system is stalled."""
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
            # The disk may only be slow for a moment. A timer looks again when it would count as stalled.
            later = threading.Timer(STALLED_S, self._say_if_stalled)
            later.daemon = True
            with contextlib.suppress(RuntimeError):  # the system has no thread left, and the line is all that is lost
                later.start()
        return is_done

    def _say_if_stalled(self) -> None:
        if self.is_stalled:
            self.warn_stalled()

    def warn_stalled(self) -> None:
        """Logs that the file system does not answer; once until it answers again."""
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "the file system of the journal or the logs does not answer: the training goes on without them, and "
                "they are written when it does"
            )

    def close(self, limit_s: float) -> None:
        """Ends the thread after the tasks that wait. Blocks for `limit_s` seconds at most; a thread that still hangs
        then is left behind (it is a daemon)."""
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
    """A log handler that writes to a file by the file thread, so that no logger ever waits for a disk. A line is
    dropped where the queue of tasks is full."""

    def __init__(self, file: TextIO, files: FileThread) -> None:
        super().__init__(file)
        self._files = files
        self._is_closed = False

    def emit(self, record: logging.LogRecord) -> None:
        """See base class. Does not block. Does nothing after `close`."""
        if self._is_closed:
            return
        try:
            text = self.format(record) + self.terminator
        except Exception:  # as the base class: a line that cannot be formatted ends nothing
            self.handleError(record)
            return
        self._files.submit(partial(self._write, text))

    def close(self) -> None:
        """Has the file thread close the file after the lines that wait. To be called before `FileThread.close`.

        Closing a file may wait for the file system as well. A file that nobody closes would be closed by the thread
        that drops the last reference to it: in `launch()` a thread of the user's.
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
