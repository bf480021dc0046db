"""Turns the bytes that ranks write into console text: each line with the rank's prefix, prompts and progress bars
without delay. Pure.

`log_pump.py` reads the ranks' files, feeds the bytes to the `ConsoleLines` of each stream with the time, and writes
what they return. A line without an end is the difficult case:

1. It is held back for 0.2 s, since the rest of a line mostly follows at once, and another rank's line must not come in
   between.
2. Then it is shown without its end: it may be a prompt.
3. If its rest comes next on this console, it follows without a prefix. If another stream was shown meanwhile, a line
   end and the prefix come first.

The log files of the ranks are not changed by any of this.
"""

from __future__ import annotations

import codecs
import math
import re
from dataclasses import dataclass

PARTIAL_S = 0.2
"""Seconds that a line without an end is held back. The rest mostly arrives at once, but a prompt must appear."""
_MAX_HELD = 1 << 16
"""Characters of a line without an end that are held back; a longer line is shown in pieces."""
# Lines end as with Python's universal newlines, and keep their end: a progress bar overwrites its line by `\r`.
_PIECE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_ENDS = ("\r", "\n")


@dataclass
class Screen:
    """A console that shows several streams, shared by their `ConsoleLines`.

    Attributes:
        open_line: the stream whose line stands last on the console, without an end; None: the cursor is at the begin of
            a line.
    """

    open_line: ConsoleLines | None = None


class ConsoleLines:
    r"""The text of one stream. A line ends in `\n` or `\r`, as for torchrun, and keeps the end that it has.

    Args:
        prefix: stands before each line, for instance `[rank0]:`.
        screen: the console, the same object for all streams that go there.
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
        """When `feed` must be called again for a line without an end (monotonic seconds); infinity: no line waits."""
        return self._held_since + PARTIAL_S

    def feed(self, content: bytes, now: float, last: bool = False) -> str:
        """Adds the bytes that were written since the last call; returns the text to show now.

        Args:
            content: the new bytes; empty where only `due` has come.
            now: monotonic seconds.
            last: nothing more will follow. A line without an end is shown and gets one.
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
        """Returns a piece of a line, with the line end and the prefix that it needs before it on this console."""
        goes_on, broken_off = self._screen.open_line is self, self._shown_partly
        after_return, self._returned = self._returned, piece.endswith("\r")
        self._shown_partly = not piece.endswith(_ENDS)
        if not goes_on and (piece == "\r" or (broken_off and not piece.strip("\r\n"))):
            # Nothing to show: tqdm begins with a `\r`; and the line end of a line that another stream has broken off
            # was shown then.
            return ""
        if not goes_on and not (after_return and piece == "\n"):
            piece = f"{self._prefix}{piece}"
            if self._screen.open_line is not None:
                piece = f"\n{piece}"
        if self._shown_partly:
            self._screen.open_line = self
        else:
            self._screen.open_line = None
        return piece
