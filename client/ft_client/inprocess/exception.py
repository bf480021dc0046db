"""Exceptions of in-process restart. An `Exception` is a fault of a rank; a `RestartAbort` ends the call there.

The wrapper raises them, and so may the user's callbacks. Names and bases are those of NVIDIA's extension, for scripts
that catch them.
"""

from __future__ import annotations


class RestartError(Exception):
    """Base class of the exceptions that prevent a restart on this rank."""


class HealthCheckError(RestartError):
    """This rank must not run the function again."""


class InternalError(RestartError):
    """Two parts of the restart disagree: a callback or rank assignment broke its contract, or there is a bug."""


class TimeoutError(RestartError):
    """A step of the restart took longer than it may."""


class RestartAbort(BaseException):
    """No further restart: raised by a callback that wants this rank to end."""


class HungAgain(RestartAbort):
    """No further restart: this rank made no progress after each restart, so interrupting it does not help."""
