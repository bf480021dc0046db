"""Exceptions that launcher, monitor and client raise, one class for each party that must act; and texts of errors.

All three import it. A bug in our own code has no class here: it is an assertion.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from rank_monitor.contract.exit_codes import ExitCode

LEFT_OUT = "[...]"
"""Stands where a text was cut, as a line of its own, so that no pattern for one line matches across the gap."""


_NO_PROCESS = (
    "no process or thread can be started: a limit of processes is reached (ulimit -u, or pids.max of a container's "
    "cgroup, of a Slurm job or a Kubernetes pod)"
)
_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
"""How the text of a RuntimeError begins where no thread can be started: Python's, and that of torch's C++ code."""


class FtError(Exception):
    """Base class of all exceptions of this project. `exit_code`: the launcher's own, when such an exception ends it."""

    exit_code = int(ExitCode.LAUNCHER_ERROR)


class ConfigError(FtError):
    """The user must act: a setting is wrong.

    The text names the setting, its value, where the value came from, what is wrong and what to do. The launcher prints
    it without a traceback, and exits with 2.

    Args:
        key: the setting, underscored.
        value: as it was given.
        source: an option, a variable or a file.
        problem: what is wrong, as the rest of a sentence about the value.
        hint: what to do; empty: the problem says that.
    """

    exit_code = int(ExitCode.BAD_CONFIG)

    def __init__(self, key: str, value: object, source: str, problem: str, hint: str = "") -> None:
        self.key = key
        self.value = value
        self.source = source
        self.problem = problem
        self.hint = hint
        text = f"{key}={value!r} (from {source}): {problem}"
        if hint:
            text = f"{text.rstrip('.')}. {hint}"
        super().__init__(text)

    # By default an exception is unpickled from `args`, the one text, and not from the arguments of `__init__`.
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return (type(self), (self.key, self.value, self.source, self.problem, self.hint))


class ProtocolError(FtError):
    """A peer sent bytes that are no valid message. The author of the peer must act. The receiver refuses such bytes and
    goes on: they never end a watch."""


class StoreLost(FtError):
    """The store of the rendezvous does not answer: its host is down or cut off. The cluster's operator must act."""


def why_refused(error: BaseException) -> str:
    """Returns what the operating system refused, in words; empty where the error is no refusal of the system.

    EAGAIN is what fork and clone say at a limit of processes; its usual text, "Resource temporarily unavailable", helps
    nobody.
    """
    if isinstance(error, OSError):
        # A descriptor that does not block gives the same error, but nobody lets that one out.
        if error.errno == errno.EAGAIN:
            return _NO_PROCESS
        return str(error)
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return _NO_PROCESS
    return ""


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's text; the name of its class where the error has no text."""
    lines = str(error).strip().splitlines()
    if lines:
        return lines[0]
    return type(error).__name__


def nearest(name: str, known: Iterable[str], cutoff: float = 0.55) -> str:
    """Returns ` (did you mean X?)`, or an empty text where no known name is similar enough.

    Args:
        name: what the user wrote.
        known: the names that exist.
        cutoff: the similarity that is needed, from 0 to 1, as `difflib` measures it.
    """
    import difflib  # here: only an error needs it, and a monitor pays for each import in memory

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    if close:
        return f" (did you mean {close[0]}?)"
    return ""


def both_ends(text: str, most: int) -> str:
    """Returns a text of at most `most` characters: a longer one is cut in the middle, where `LEFT_OUT` then stands.

    An error is named at the beginning of its text, and at the end where the text wraps the error of another process.
    """
    if len(text) <= most:
        return text
    half = (most - len(LEFT_OUT) - 2) // 2
    return f"{text[:half]}\n{LEFT_OUT}\n{text[-half:]}"


def text_of(error: BaseException) -> str:
    """Returns the text of an exception, even if its `__str__`, which is the program's own code, raises."""
    try:
        return str(error)
    except Exception as problem:
        return f"<no text: str() raised {type(problem).__name__}>"
