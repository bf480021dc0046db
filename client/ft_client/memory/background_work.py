"""The one thread of this process that works behind the training: it checksums and names what was saved, and makes files
ready for the next save.

Whoever uses the rank's files calls `wait` first. So the thread `ft_memory` and the main thread never use a file at the
same time, also where an in-process restart has cut off a save, and another `MemoryCheckpoint` takes the files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWork:
    """Runs one piece of work at a time in a thread of its own. Called by the main thread alone."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread, once what ran before is over. Does not wait for `work`."""
        self.wait()
        # Not a daemon: where the program ends in order, the last save still gets its name. The work needs no other
        # process and no lock, so it ends.
        self._thread = threading.Thread(target=self._run, args=(work,), name="ft_memory")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the thread has nothing to do: for as long as a checksum takes."""
        thread = self._thread
        # An interrupt may have come between the two lines of `start`; that thread never runs.
        if thread is not None and thread.ident is not None:
            thread.join()
        self._thread = None

    def pop_problem(self) -> Exception | None:
        """Returns what the last work raised, once."""
        problem, self._problem = self._problem, None
        return problem

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as problem:
            self._problem = problem


BACKGROUND = BackgroundWork()
"""The one of this process."""
