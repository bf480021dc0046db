"""Turns what ranks write into console text: with the rank's prefix, and without delay for progress bars and prompts.

Pure: bytes and the time in, text out. Called by `log_pump.py`, which has the threads and files, so that what a console
shows is tested without them; log files are not changed by any of this.
"""

from __future__ import annotations

import codecs
import math
import re
from dataclasses import dataclass

PARTIAL_S = 0.2
"""Seconds that a line without an end is held back: the rest mostly arrives at once, but a prompt must appear."""
_MAX_HELD = 1 << 16
"""Characters of a line without an end that are held back; a longer one is shown in pieces."""
# Lines end as for Python's universal newlines, and keep their end: a progress bar overwrites its line by `\r`.
_PIECE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_ENDS = ("\r", "\n")


@dataclass
class Screen:
    """A console that shows several streams; `open_line`: the stream whose last line there has no end yet."""

    open_line: ConsoleLines | None = None


class ConsoleLines:
    r"""The text of one stream. A line ends in `\n` or `\r`, as for torchrun, and keeps the end that it has.

    Each line begins with the prefix. The rest of a line that was shown without its end gets no second prefix, unless
    another stream was shown meanwhile: then it begins a new line.
    """

    def __init__(self, prefix: str, screen: Screen) -> None:
        self._prefix = prefix
        self._screen = screen
        # Incremental: a read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._held_since = math.inf
        self._shown_partly = False
        self._returned = False

    def due(self) -> float:
        """When `feed` is to be called for a line without an end (monotonic seconds); infinity: there is none."""
        return self._held_since + PARTIAL_S

    def feed(self, content: bytes, now: float, last: bool = False) -> str:
        """Takes new bytes; returns the text to show now.

        Args:
            content: written since the last call.
            now: monotonic seconds.
            last: nothing more will follow: a line without an end gets one.
        """
        held = self._held
        pieces = _PIECE.findall(held + self._decoder.decode(content, last))
        if pieces and not pieces[-1].endswith(_ENDS):
            self._held = pieces.pop()
        else:
            self._held = ""
        if not self._held:
            self._held_since = math.inf
        elif pieces or not held:
            self._held_since = now
        text = "".join(map(self._show, pieces))
        if self._held and (last or now >= self.due() or len(self._held) > _MAX_HELD):
            text += self._show(self._held)
            self._held, self._held_since = "", math.inf
        if last and self._screen.open_line is self:
            text += self._show("\n")
        return text

    def _show(self, piece: str) -> str:
        """Returns a piece of a line with the line end and prefix that it needs before it."""
        goes_on, broken_off = self._screen.open_line is self, self._shown_partly
        after_return, self._returned = self._returned, piece.endswith("\r")
        self._shown_partly = not piece.endswith(_ENDS)
        if not goes_on and (piece == "\r" or (broken_off and not piece.strip("\r\n"))):
            return ""  # tqdm begins with one; and the line was ended when another stream was shown
        if not goes_on and not (after_return and piece == "\n"):
            piece = f"{self._prefix}{piece}"
            if self._screen.open_line is not None:
                piece = f"\n{piece}"
        if self._shown_partly:
            self._screen.open_line = self
        else:
            self._screen.open_line = None
        return piece
