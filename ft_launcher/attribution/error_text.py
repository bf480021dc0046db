"""Reads what Python and torch write of an exception: tracebacks with their chains, torch's error files. Pure.

Knows no meaning of an error; that is `known_errors.py`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rank_monitor.contract.foreign import parse_json
from rank_monitor.contract.messages import RankException

_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n"
_FRAME = re.compile(r'File "([^"\n]{1,4096})", line (\d+)')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen |/ft_client/")
_CARETS = re.compile(r"[\s~^]*")
_LONGEST = 200
_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""torch puts it before what an uncaught exception prints."""
_ERROR_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*)?(?:Error|Exception): .")
_NEAR_END = 12
"""hydra prints two lines after a traceback, click its usage before the error."""
_MOST_MESSAGE = 1000


@dataclass(frozen=True)
class Link:
    """One exception of a chain: its own words (`ValueError: bad`), and whether the next was raised because of it."""

    words: str
    caused_next: bool = False


def chain(exception: RankException) -> list[Link]:
    """The exceptions that led to this one, which is the last, with its message in full."""
    last = Link(f"{exception.type}: {exception.message}")
    blocks = re.split(f"({_CAUSED}|{_MEANWHILE})", exception.traceback)
    earlier = zip(blocks[:-1:2], blocks[1::2], strict=True)
    return [*(Link(_words(block), joint == _CAUSED) for block, joint in earlier), last]


def _words(block: str) -> str:
    """What follows the frames of one traceback."""
    lines = block.strip("\n").splitlines()
    at = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=0)
    return "\n".join(line for line in lines[at:] if not line.startswith(("  ", "Traceback ")))


def place(traceback: str) -> str:
    """`file:line` of the innermost frame; empty when there is none."""
    frames = _FRAME.findall(traceback)
    return "{}:{}".format(*frames[-1]) if frames else ""


def raised_by_program(traceback: str) -> bool:
    """Whether the innermost frame is a `raise` or `assert` in a file of the user's, not of a library."""
    lines = traceback.splitlines()
    at = max((number for number, line in enumerate(lines) if _FRAME.search(line)), default=None)
    if at is None or _LIBRARY.search(lines[at]):
        return False
    return any(line.strip().startswith(("raise", "assert")) for line in lines[at + 1 : at + 2])


def excerpt(traceback: str, most: int = 5) -> tuple[str, ...]:
    """The lines of a traceback that say most: the innermost frame of the user's, the innermost of all, the words.

    Args:
        most: lines at most.
    """
    lines = [
        line.rstrip()[:_LONGEST] for line in traceback.rpartition(_CAUSED)[2].rpartition(_MEANWHILE)[2].splitlines()
    ]
    lines = [line for line in lines if line and not _CARETS.fullmatch(line)]
    frames = [number for number, line in enumerate(lines) if _FRAME.search(line)]
    if not frames:
        return tuple(lines[-most:])
    own = max((number for number in frames if not _LIBRARY.search(lines[number])), default=frames[-1])
    source = [line for line in lines[own + 1 : own + 2] if line.startswith("    ")]
    innermost = [lines[frames[-1]]] if frames[-1] != own else []
    words = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")]
    return (lines[own], *source, *innermost, *words)[:most]


def of_output(text: str) -> RankException | None:
    """The exception that a program printed before it exited with an error, in the last lines that it wrote.

    Args:
        text: the end of its output. An exception that more than a few lines follow is not what ended it.

    Returns:
        None where the last lines hold none.
    """
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    near_end = len(lines) - _NEAR_END
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    for start in starts[-1:]:
        after = range(start + 1, len(lines))
        words = next((number for number in after if lines[number] and not lines[number].startswith(" ")), None)
        if words is not None and words >= near_end:
            return _printed(lines[_first_of_chain(lines, starts) :], lines[words:])
    for number in range(len(lines) - 1, max(-1, near_end - 1), -1):
        if _ERROR_LINE.match(lines[number]):
            return _printed([], lines[number:])
    return None


def _first_of_chain(lines: list[str], starts: list[int]) -> int:
    """Where the first traceback begins of those that led to the last one."""
    joints = {_CAUSED.strip(), _MEANWHILE.strip()}
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if joints.isdisjoint(lines[start:first]):
            break
        first = start
    return first


def _printed(traceback: list[str], words: list[str]) -> RankException:
    end = words.index("") if "" in words else len(words)
    kind, _, message = "\n".join(words[:end]).partition(": ")
    return RankException(kind, message[:_MOST_MESSAGE], "\n".join(traceback), 0.0)


def of_error_file(content: bytes) -> RankException | None:
    """The exception in a file of torch's `record` decorator, or of ours; None when it holds none."""
    try:
        told: Any = parse_json(content)["message"]
        if isinstance(told, str):
            told = {"message": told}
        words, extra = str(told["message"]), told.get("extraInfo", {})
        kind, found, message = words.partition(": ")
        if not found or not all(part.isidentifier() for part in kind.split(".")):
            kind, message = "Exception", words
        return RankException(kind, message, str(extra.get("py_callstack", "")), float(extra.get("timestamp", 0)))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
