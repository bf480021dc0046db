"""Parses what Python and torch write about an exception: tracebacks with their chains, torch's error files. Pure.

An exception reaches the launcher in one of three ways: as a report of `ft_client` (whole), in torch's error file
(`of_error_file`), or only as the last lines that the rank printed (`of_output`). Each becomes a `RankException`.
Callers: `first_failure.py`, `known_errors.py` and `agent/cycle/evidence.py`. What an error means is decided in
`known_errors.py`, not here. A rank chooses these texts, so every pattern is bounded and every result is cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ft_launcher.decide.attribution.wrapped_errors import GROUP, is_group, without_margins
from rank_monitor.contract.errors import both_ends
from rank_monitor.contract.wire.foreign import parse_json
from rank_monitor.contract.wire.messages import RankException

# The two lines that Python's traceback module puts between the exceptions of a chain (PEP 3134).
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n"
# 4096 is Linux's PATH_MAX. The bound keeps the search linear in the length of the text.
_FRAME = re.compile(r'File "([^"\n]{1,4096})", line (\d+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen |/ft_client/")
# Python 3.11 and later mark the failing expression by a line of carets below the source line (PEP 657). In an excerpt
# the carets would point at nothing.
_CARETS = re.compile(r"[\s~^]*")
# Characters of one line of an excerpt. The message of an exception can put a whole tensor on one line.
_LONGEST = 200
_MAX_LINES = 5
"""Lines of an excerpt, which stands in the block of at most ten lines on the console."""
_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""The prefix that torch puts before each line of an uncaught exception."""
_ERROR_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*)?(?:Error|Exception): .")
_GROUP_END = re.compile(r"^ +\+-{4,}$")
_USAGE_ERROR = re.compile(r"[^\s:]{1,200}: error: (.{1,1000})")
"""The last line that argparse prints about a wrong command line, after its usage."""
_NEAR_END = 12
"""Lines at the end of a rank's output in which the error that ended it must be: an error further up was handled, and
the rank went on. hydra prints two lines after a traceback, click its usage before the error."""
# Characters of a message from a rank's output. Lines that the program printed after its error may be part of the text;
# the beginning and the end name the error.
_MAX_MESSAGE = 2000


@dataclass(frozen=True)
class ChainLink:
    """One exception of a chain.

    Attributes:
        text: its type and message: `ValueError: bad`.
        caused_next: it is the direct cause of the next exception (`raise ... from ...`); False: the next exception was
            raised while this one was handled.
    """

    text: str
    caused_next: bool = False


def chain(exception: RankException) -> list[ChainLink]:
    """Returns the chain of exceptions of a traceback, the oldest first. The last is `exception`, with its whole
    message.

    The text of an exception group is followed by the tracebacks of its members, since its own message only counts them.
    """
    blocks = re.split(f"({_CAUSED}|{_MEANWHILE})", exception.traceback)
    last = ChainLink(_with_members(f"{exception.type}: {exception.message}", blocks[-1]))
    earlier = zip(blocks[:-1:2], blocks[1::2], strict=True)
    links = (ChainLink(_with_members(_type_and_message(block), block), joint == _CAUSED) for block, joint in earlier)
    return [*links, last]


def _with_members(text: str, block: str) -> str:
    """Returns a text, followed by the tracebacks of its members if it is that of an exception group."""
    if is_group(block):
        return f"{text}\n{without_margins(block)}"
    return text


def _type_and_message(block: str) -> str:
    """Returns the type and message of one printed traceback, which are the lines after its frames."""
    lines = block.strip("\n").splitlines()
    at = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=0)
    return "\n".join(line for line in lines[at:] if not line.startswith(("  ", "Traceback ")))


def location(traceback: str) -> str:
    """Returns `FILE:LINE` of the innermost frame of a traceback; empty when the text has no frame."""
    frames = _FRAME.findall(traceback)
    if frames:
        return "{}:{}".format(*frames[-1])
    return ""


def raised_by_program(traceback: str) -> bool:
    """Returns whether the innermost frame is a `raise` or an `assert` in a file of the user's, not of a library."""
    lines = without_margins(traceback).splitlines()
    at = max((number for number, line in enumerate(lines) if _FRAME.search(line)), default=None)
    if at is None or _LIBRARY.search(lines[at]):
        return False
    return any(line.strip().startswith(("raise", "assert")) for line in lines[at + 1 : at + 2])


def excerpt(traceback: str) -> tuple[str, ...]:
    """Returns at most five lines of a traceback for the console: the innermost frame of the program with its source
    line, the innermost frame of all, and the message."""
    last = without_margins(traceback.rpartition(_CAUSED)[2].rpartition(_MEANWHILE)[2])
    lines = [line.rstrip()[:_LONGEST] for line in last.splitlines()]
    lines = [line for line in lines if line and not _CARETS.fullmatch(line)]
    frames = [number for number, line in enumerate(lines) if _FRAME.search(line)]
    if not frames:
        return tuple(lines[-_MAX_LINES:])
    own = max((number for number in frames if not _LIBRARY.search(lines[number])), default=frames[-1])
    source = [line for line in lines[own + 1 : own + 2] if line.startswith("    ")]
    if frames[-1] != own:
        innermost = [lines[frames[-1]]]
    else:
        innermost = []
    message = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")]
    return (lines[own], *source, *innermost, *message)[:_MAX_LINES]


def of_output(text: str) -> RankException | None:
    """Returns the exception that a rank printed before it exited with an error; None: its last lines have none.

    For ranks whose exception was not reported: `--no-python`, a program that prints and calls `sys.exit(1)`, argparse.
    Tried in this order: a group, a traceback, argparse's error after its usage, a single line `SomeError: text`.

    Args:
        text: the end of the rank's output. An exception followed by more than `_NEAR_END` lines did not end the rank.
    """
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    near_end = len(lines) - _NEAR_END
    if any(_GROUP_END.match(line) for line in lines[max(0, near_end) :]):
        return _printed_group(lines)
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    for start in starts[-1:]:
        after = _from_message(lines[start:])
        # The message may itself end with the traceback of another process, so its last error line counts as its end.
        last = max((number for number, line in enumerate(after) if _ERROR_LINE.match(line)), default=0)
        if after and len(lines) - len(after) + last >= near_end:
            return _printed(lines[_first_of_chain(lines, starts) :], after)
    refused = _USAGE_ERROR.fullmatch("".join(lines[-1:]))
    if refused is not None and any(line.startswith("usage: ") for line in lines):
        return RankException("argparse.ArgumentError", refused[1], "", 0.0)
    for number in range(len(lines) - 1, max(-1, near_end - 1), -1):
        if _ERROR_LINE.match(lines[number]):
            return _printed([], lines[number:])
    return None


def _from_message(lines: list[str]) -> list[str]:
    """Returns the lines of a traceback from its type and message on; empty: there are none.

    Args:
        lines: begin with the first line of the traceback.
    """
    at = next((number for number in range(1, len(lines)) if lines[number] and not lines[number].startswith(" ")), None)
    if at is None:
        return []
    return lines[at:]


def _printed_group(lines: list[str]) -> RankException | None:
    """Returns the last exception group among printed lines; None where its first line was cut off."""
    start = max((number for number, line in enumerate(lines) if line == GROUP), default=None)
    if start is None:
        return None
    group = "\n".join(lines[start:])
    for line in _from_message(without_margins(group).splitlines())[:1]:
        kind, _, message = line.partition(": ")
        return RankException(kind, message, group, 0.0)
    return None


def _first_of_chain(lines: list[str], starts: list[int]) -> int:
    """Returns the index of the line at which the chain of the last traceback begins.

    Args:
        starts: indexes of the first lines of all tracebacks.
    """
    joints = {_CAUSED.strip(), _MEANWHILE.strip()}
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if joints.isdisjoint(lines[start:first]):
            break
        first = start
    return first


def _printed(traceback: list[str], after: list[str]) -> RankException:
    """Returns the exception of printed lines.

    Args:
        traceback: the lines of its traceback; may be empty.
        after: the lines from its type and message on. They count up to the first empty line. The type stands on the
            first line even without a message: the next line may be something that the program printed.
    """
    if "" in after:
        end = after.index("")
    else:
        end = len(after)
    kind, _, first = after[0].partition(":")
    message = "\n".join([first, *after[1:end]]).lstrip()
    return RankException(kind, both_ends(message, _MAX_MESSAGE), "\n".join(traceback), 0.0)


def of_error_file(content: bytes) -> RankException | None:
    """Returns the exception in an error file of torch's `record` decorator, or of ours; None: it contains none."""
    # torch writes `message` either as text or as an object with `message` and `extraInfo`.
    try:
        error: Any = parse_json(content)["message"]
        if isinstance(error, str):
            error = {"message": error}
        text, extra = str(error["message"]), error.get("extraInfo", {})
        kind, found, message = text.partition(": ")
        if not found or not all(part.isidentifier() for part in kind.split(".")):
            kind, message = "Exception", text
        return RankException(kind, message, str(extra.get("py_callstack", "")), float(extra.get("timestamp", 0)))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
