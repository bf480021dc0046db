"""Exceptions that launcher, monitor and client raise, one class for each party that must act.

All three import it. A bug is no class of these: it is an assertion.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from rank_monitor.contract.exit_codes import ExitCode

LEFT_OUT = "[...]"
"""A line of its own, so that no pattern that stays in a line matches across the gap."""


_NO_PROCESS = (
    "no process or thread can be started: a limit of processes is reached (ulimit -u, or pids.max of a container's "
    "cgroup, of a Slurm job or a Kubernetes pod)"
)
_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
"""What the RuntimeError says that Python raises, and the one that C++ code of torch does, in which no thread starts."""


class FtError(Exception):
    """Base class of all exceptions of this project. `exit_code`: the launcher's, when one of the class ends it."""

    exit_code = int(ExitCode.LAUNCHER_ERROR)


class ConfigError(FtError):
    """The user must act: a setting is wrong.

    The text names the setting, its value, where it came from, what is wrong and what to do.
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

    # By default an exception is unpickled from `args`, the one text, and not from what `__init__` takes.
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return (type(self), (self.key, self.value, self.source, self.problem, self.hint))


class ProtocolError(FtError):
    """A peer sent bytes that are no valid message. The author of the peer must act. It never ends a watch."""


class StoreLost(FtError):
    """The store of the rendezvous does not answer: its host is down or cut off."""


def why_refused(error: BaseException) -> str:
    """Returns what the operating system refused, in words; empty where the error says nothing of that."""
    if isinstance(error, OSError):
        # Of a descriptor that does not block it is no refusal, and nobody lets that error out.
        if error.errno == errno.EAGAIN:
            return _NO_PROCESS
        return str(error)
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return _NO_PROCESS
    return ""


def one_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class where it has none."""
    lines = str(error).strip().splitlines()
    if lines:
        return lines[0]
    return type(error).__name__


def nearest(name: str, known: Iterable[str], cutoff: float = 0.55) -> str:
    """Returns ` (did you mean X?)`, or an empty text where no name has the similarity `cutoff` (0 to 1, of difflib)."""
    import difflib  # only at an error: monitors are lean

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    if close:
        return f" (did you mean {close[0]}?)"
    return ""


def both_ends(text: str, most: int) -> str:
    """Returns a text, and of one that is longer than `most` characters its two ends, together so long.

    An error is named at the beginning of its text, and at the end where it wraps that of another process.
    """
    if len(text) <= most:
        return text
    half = (most - len(LEFT_OUT) - 2) // 2
    return f"{text[:half]}\n{LEFT_OUT}\n{text[-half:]}"


def text_of(error: BaseException) -> str:
    """The text of an exception, whatever its `__str__` does."""
    try:
        return str(error)
    except Exception as problem:
        return f"<no text: str() raised {type(problem).__name__}>"
