"""Keeps errors in code that only describes a fault from ending the launcher: reading evidence, records, console lines.

Used around code that reads what ranks wrote: a rank may write anything, and a description is worth less than the
training. No decision may depend on such a block alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)

# Characters. The text may be a rank's, of any length, and the log line stays one line.
_MAX_TEXT = 300


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """A context, or a decorator, in which an exception becomes one log line and the code after it runs.

    Nothing that decides belongs inside.

    Args:
        what: what could not be done, for the log line.
    """
    try:
        yield
    except Exception as error:
        log_contained(what, error)


def log_contained(what: str, error: Exception) -> None:
    """Writes the log line for an exception that was caught, in printable ASCII."""
    # Control characters of a rank must not reach the terminal.
    text = ascii(str(error))[1:-1][:_MAX_TEXT]
    logger.warning("%s: %s: %s. The launcher goes on without", what, type(error).__name__, text)
    logger.debug("where it was raised", exc_info=error)
