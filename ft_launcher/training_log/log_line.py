r"""What ranks print, line by line: `Lines` divides it, and a `LogLine` is what one line says of the training. Pure.

Called by `log_watch.py` and by the presets, which read the fields of a line. `\n` and `\r` end a line, and its colours
are removed. A rank may print anything: a line is cut at `MAX_LINE` bytes, and no more is kept of one without an end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.wire.messages import NO_ITERATION

# 18 digits always fit into 64 bits; the longest exact form of a float has 24 characters.
_MOST_DIGITS, _MOST_CHARACTERS = 18, 32
_MOST_STEP_S = 1e6
"""Eleven days: more is no time of a step."""
MAX_LINE = 4096
"""Bytes of a line that are read. Ten times a line of Megatron with all its fields."""
_END = re.compile(rb"[\r\n]")
# Colours, and the movements of the cursor by which progress bars stand below each other (ECMA-48, control sequences).
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class LogLine:
    """What a line says. All that it does not say has its default.

    `iteration`: the step, counted through the whole training. `steps`: how many were done since the line before.
    `step_s`: how long one takes. `is_complete`: what it counts is complete, so no further step is expected for now.
    """

    iteration: int = NO_ITERATION
    steps: int = 0
    step_s: float = 0.0
    loss: float | None = None
    is_complete: bool = False


Reader: TypeAlias = Callable[[str], LogLine | None]
"""Reads one line; returns None for one that says nothing of the training."""


def whole_number(text: str | None) -> int:
    """Returns the number in a text, NO_ITERATION when it is none."""
    if text is None or not text.isdecimal() or len(text) > _MOST_DIGITS:
        return NO_ITERATION
    return int(text)


def number(text: str | None) -> float | None:
    """Returns the number in a text, which may be nan or inf; None when it is none."""
    if text is None or len(text) > _MOST_CHARACTERS:
        return None
    try:
        return float(text.strip(" ,;:'\""))
    except ValueError:
        return None


def seconds(text: str | None, unit_s: float = 1.0) -> float:
    """Returns a time of a step in seconds, 0 when the text is none."""
    found = number(text)
    if found is None or not math.isfinite(found) or not 0 < found * unit_s < _MOST_STEP_S:
        return 0.0
    return found * unit_s


class Lines:
    """The lines of one stream of a rank.

    Args:
        within_a_line: whether it begins somewhere in one, whose rest is left out.
    """

    def __init__(self, within_a_line: bool = False) -> None:
        self._open = b""
        self._within_a_line = within_a_line

    def take(self, content: bytes) -> list[str]:
        """Takes what was printed since the last call; returns the lines that have ended, without empty ones."""
        if self._within_a_line:
            end = _END.search(content)
            if end is None:
                return []
            content = content[end.end() :]
            self._within_a_line = False
        *ended, last = _END.split(content)
        found = []
        for part in ended:
            found.append(self._with(part))
            self._open = b""
        self._open = self._with(last)
        return [text for text in map(_text, found) if text]

    @property
    def open_line(self) -> str:
        """The text after the last line end: a progress bar has its end at its next change only."""
        return _text(self._open)

    def _with(self, part: bytes) -> bytes:
        return self._open + part[: MAX_LINE - len(self._open)]


def _text(line: bytes) -> str:
    text = line.decode(errors="replace")
    if "\x1b" in text:
        text = _CONTROL.sub("", text)
    return text.strip()
