"""The one thread of this process that works behind the training: it checksums and names what was saved, and makes files
ready for the next save.

Whoever uses the rank's files calls `wait` first. So the thread `ft_memory` and the main thread never use a file at the
same time, also where an in-process restart has cut off a save, and another `MemoryCheckpoint` takes the files.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class BackgroundWork:
    """Runs one piece of work after the other in one thread, which starts with the first. Called by the main thread
    alone.

    The thread is no daemon: where the program ends in order, the last save still gets its name. The work needs no other
    process, so it ends.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ft_memory")
        self._problem: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Has `work` run in the thread. Does not wait."""
        self._executor.submit(self._run, work)

    def wait(self) -> None:
        """Waits until the thread has nothing to do: for as long as a checksum takes.

        It asks the thread, and no object of `start`: an interrupt may have come before such an object was stored.
        """
        self._executor.submit(int).result()

    def pop_problem(self) -> Exception | None:
        """Returns what the last work raised, once."""
        problem = self._problem
        self._problem = None
        return problem

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as problem:
            # Without the frames, which would keep the state alive that they worked on: the old model, on a GPU, while a
            # restart in process makes the new one.
            problem.__cause__ = problem.__context__ = None
            self._problem = problem.with_traceback(None)


BACKGROUND = BackgroundWork()
"""The one of this process."""
