"""What in-process restart raises. An `Exception` is a fault of one rank; a `RestartAbort` ends that rank's part."""

from __future__ import annotations


class RestartError(Exception):
    """Base of what stands in the way of a restart on this rank."""


class HealthCheckError(RestartError):
    """This rank is not fit to run the function again."""


class InternalError(RestartError):
    """Two parts of the restart disagree: a callback or rank assignment broke its contract, or there is a bug."""


class TimeoutError(RestartError):
    """A step of the restart took longer than it may."""


class RestartAbort(BaseException):
    """No further restart: raised by a callback that wants this rank to end."""
