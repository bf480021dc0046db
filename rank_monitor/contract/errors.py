"""Exceptions, sorted by who must act. Lives here because all three processes raise them."""

from __future__ import annotations


class FtError(Exception):
    """Base of every error of ours."""


class ConfigError(FtError):
    """The user must act: a setting is wrong. The launcher answers with exit code 2.

    The text names the setting, its value, where it came from, what is wrong and what to do.
    """

    def __init__(self, key: str, value: object, source: str, problem: str, hint: str = "") -> None:
        self.key = key
        self.value = value
        self.source = source
        self.problem = problem
        self.hint = hint
        text = f"{key}={value!r} (from {source}): {problem}"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return (type(self), (self.key, self.value, self.source, self.problem, self.hint))


class ProtocolError(FtError):
    """A peer sent bytes that are no message of ours; whoever wrote them must act. Never ends a watch."""


class RankGone(FtError):
    """The rank's process has ended; a signal or question to it has no addressee."""


class StoreLost(FtError):
    """The store of the rendezvous does not answer; the host of it is down or cut off."""
