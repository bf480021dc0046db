"""Keeps errors in what only describes a fault - reading evidence, records, the console - from ending the launcher."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_MAX_TEXT = 300


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """A block, or as a decorator a function, in which an exception is one log line: the code after it runs.

    Nothing that decides belongs inside.

    Args:
        what: says in the log line what could not be done.
    """
    try:
        yield
    except Exception as error:
        log_contained(what, error)


def log_contained(what: str, error: Exception) -> None:
    """The log line for an exception that was caught, in printable characters."""
    text = ascii(str(error))[1:-1][:_MAX_TEXT]
    logger.warning("%s: %s: %s. The launcher goes on without", what, type(error).__name__, text)
    logger.debug("where it was raised", exc_info=error)
