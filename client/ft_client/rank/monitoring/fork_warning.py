"""Keeps Python's warning of a fork in a process with threads from a script that has no other thread than ours.

From 3.12 on Python warns in `os.fork()` where the process has more than one thread, as the kernel counts them, and with
`-W error` raises that warning. In a rank there are two threads of ours: the watchdog, and torch's server that answers
the monitor (`rank/start/after_import.py`). A script that has started no thread would be warned of these two, which it
is not under torchrun. The warning is about locks that a thread may hold at the fork; no child uses a lock of these two
threads (`process.py` closes the link in the child). With one more thread the warning is Python's own again.

`process.py` calls `keep_away` once in a rank. What it registers runs in the thread that forks; where it changes
anything, the process has no other thread of the script.
"""

from __future__ import annotations

import _warnings
import contextlib
import functools
import os
import sys
from typing import Any

from ft_client.rank.monitoring import hidden_thread

_SINCE = (3, 12)
_TASKS = "/proc/self/task"
_SERVER = "pt_workerserver"
"""The name that torch gives its server's thread; the kernel cuts such a name after 15 bytes."""
_WARNING_TEXT = "is multi-threaded, use of "


class _ForkWarning:
    """Stands in a filter of warnings in the place of a pattern. It removes the filter when the warning has come.

    Python raises the warning before it calls `after_in_parent` in 3.12, and after it from 3.13 on.
    """

    def match(self, text: str) -> bool:
        """Called by the interpreter with the text of a warning. Returns whether that is the warning of a fork."""
        if _WARNING_TEXT not in text:
            return False
        _remove_filter()
        return True


_FILTER = ("ignore", _ForkWarning(), DeprecationWarning, None, 0)


@functools.cache
def keep_away() -> None:
    """Sets this up, in this process and its forks. Called once in a rank."""
    if sys.version_info >= _SINCE:
        os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    """Runs before each fork, in the thread that forks: puts the filter in place if all other threads are ours."""
    _remove_filter()  # of an earlier fork that failed: no warning came that would have removed the filter
    with contextlib.suppress(OSError):
        tasks = os.listdir(_TASKS)  # noqa: PTH208 (pathlib costs each rank 4 ms at its start)
        if len(tasks) > 1 and len(tasks) - 1 == hidden_thread.count() + _servers(tasks):
            _filters().insert(0, _FILTER)


def _in_child() -> None:
    """Runs in the child, which has none of the parent's other threads."""
    _remove_filter()
    hidden_thread.reset()


def _servers(tasks: list[str]) -> int:
    """Returns how many of these threads of the process are torch's server: one or none."""
    return sum(_name_of(task) == _SERVER for task in tasks)


def _name_of(task: str) -> str:
    with open(f"{_TASKS}/{task}/comm") as comm:  # noqa: PTH123 (as above)
        return comm.read().strip()


def _remove_filter() -> None:
    filters = _filters()
    if _FILTER in filters:
        filters.remove(_FILTER)


def _filters() -> list[Any]:
    """Returns the list of filters that the interpreter asks: that of the module `warnings` once a script has imported
    it.

    The list is changed directly: `filterwarnings` and `catch_warnings` would also have the interpreter forget which
    warnings it has shown once.
    """
    return getattr(sys.modules.get("warnings", _warnings), "filters")  # type: ignore[no-any-return] # noqa: B009
