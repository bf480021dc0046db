r"""Divides what a rank prints into lines: `\n` and `\r` end one, and its colours are removed. Pure.

A rank may print anything: a line is cut at `MAX_LINE` bytes, and no more than that is kept of one without an end.
"""

from __future__ import annotations

import re

MAX_LINE = 4096
"""Bytes of a line that are read. Ten times a line of Megatron with all its fields."""
_END = re.compile(rb"[\r\n]")
# Colours, and the movements of the cursor by which progress bars stand below each other (ECMA-48, control sequences).
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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
