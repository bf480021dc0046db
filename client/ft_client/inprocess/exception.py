"""Exceptions of in-process restart.

The wrapper raises them, and so may the user's callbacks. What follows depends on the base class:

- An `Exception` in the function or before it is a fault: all ranks restart. After a fault, in `finalize` or the health
  check, it ends the call on this rank, and the other ranks restart without it.
- A `BaseException` that is no `Exception`, such as `RestartAbort`, ends the call on this rank at any time.

Names and bases are those of NVIDIA's extension, for scripts that catch them; `HungAgain` is ours.
"""

from __future__ import annotations


class RestartError(Exception):
    """Base class of the exceptions that prevent a restart on this rank."""


class HealthCheckError(RestartError):
    """This rank must not run the function again: its device or process is broken."""


class InternalError(RestartError):
    """Two parts of the restart disagree: a callback or rank assignment broke its contract, or there is a bug."""


class TimeoutError(RestartError):
    """A step of the restart took longer than it may. Not Python's `TimeoutError`."""


class RestartAbort(BaseException):
    """No further restart: raised by a callback that wants this rank to end, or by the wrapper on all ranks when another
    restart would not help (`restart/escalating.py`)."""


class HungAgain(RestartAbort):
    """No further restart: this rank made no progress after each restart, so interrupting it does not help."""
