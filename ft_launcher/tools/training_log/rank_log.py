"""What a rank has printed of its training, and for how long it has printed no step. Pure: lines and the time in.

`log_watch.py` puts in what it reads, and calls `judge` when a limit is due. The limit begins with the first printed
step, since nobody knows how long a training takes until then, and rests while what the lines count is complete: an
epoch is over, and nobody knows how long the evaluation or checkpoint after it takes.

    no step yet --step--> counting --`is_complete`--> resting --step--> counting
                             | the limit has passed
                          overdue --step--> counting

A line that is no step changes nothing. A rank becomes overdue once; its next step makes it count again.

Before the first step the last lines are kept. Where a rank prints for a minute and none of its lines is a step, the
preset or the expression may be meant for another program: `StepsMissing` quotes one of those lines.

`Lines` divides what a rank prints. `\\n` and `\\r` end a line, and colours are removed. A rank may print anything, so a
line is cut at `MAX_LINE` bytes, and no more is kept of a line without an end.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ft_launcher.tools.training_log.presets import HAVE_BARS, LogLine, preset_of, reader
from rank_monitor.contract.wire.launcher_messages import LogOverdue, LogStep
from rank_monitor.contract.wire.messages import NO_ITERATION
from rank_monitor.contract.wire.rank_times import Durations

NS_PER_S = 1_000_000_000
_MAX_STEPS = 10**18
"""Largest count of steps in a message, whose field has 64 bits."""
MAX_LINE = 4096
"""Bytes of a line that are read: ten times a line of Megatron with all its fields."""
_END = re.compile(rb"[\r\n]")
# Colours, and the movements of the cursor by which progress bars stand below each other (ECMA-48, control sequences).
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PATIENCE_S = 60.0
"""Seconds from the first printed line to the line at which steps are missing. A training prints its settings within a
minute; what it does before its first step (compilation, a download) is mostly silent."""
_KEPT_LINES = 100
"""Lines that are kept before the first step. Between two steps a program prints far fewer, so one of them is a step if
the preset fits."""


@dataclass(frozen=True)
class BadLoss:
    """A printed loss that is not a finite number: `nan`, `inf` or `-inf`. `iteration` is NO_ITERATION where none was
    printed."""

    iteration: int
    loss: str


@dataclass(frozen=True)
class StepsMissing:
    """A rank has printed for a minute, and none of its lines was a step.

    Attributes:
        line: a line that the rank printed; the one with a step, where a preset finds one.
        preset: the preset that finds a step in that line; empty: no preset does.
    """

    line: str
    preset: str


News: TypeAlias = LogStep | LogOverdue | BadLoss | StepsMissing
"""A finding about the printed lines of one rank. The first two are messages to its monitor."""


class RankLog:
    """The printed lines of one rank: counts steps, measures the time between them, and judges the limit.

    Args:
        watch_log: the value of `--ft-watch-log`: a preset or an expression.
        limit_s: the longest time from one step to the next (seconds); None: no limit.
    """

    def __init__(self, watch_log: str, limit_s: float | None) -> None:
        self._read = reader(watch_log)
        self._has_bars = watch_log in HAVE_BARS
        self._limit_ns = None if limit_s is None else round(limit_s * NS_PER_S)
        self._since_ns: int | None = None
        self._is_overdue = False
        self._iteration = NO_ITERATION
        self._steps = 0
        self._step_s = 0.0
        self._at_ns: int | None = None
        self._is_finite = True
        self._news: list[News] = []
        self.has_steps = False
        """Whether any line so far was a step."""
        self.intervals = Durations()
        """The times from one printed step to the next, while the limit counts, or would count. They are as exact as the
        moments at which the lines were read. Left out: an interval of which a part was not read, and one that the limit
        ended."""
        self._has_read_all = True
        self._without_step: deque[str] = deque(maxlen=_KEPT_LINES)
        self._first_line_ns: int | None = None
        self._last_line_ns = 0

    def note_lines(self, lines: Iterable[str], open_line: str, now_ns: int) -> None:
        """Notes the lines of one stream that were read at `now_ns`.

        Args:
            lines: the complete lines.
            open_line: the text after the last line end. A progress bar gets its line end only at its next change, so a
                bar that looks whole is read as a line.
            now_ns: when they were read (monotonic nanoseconds).
        """
        for line in lines:
            self._note(self._read(line), now_ns)
            if self.has_steps:
                self._without_step.clear()
            else:
                self._note_without_step(line, now_ns)
        if self._has_bars and open_line.endswith("]"):
            self._note(self._read(open_line), now_ns)

    def steps_missing(self) -> StepsMissing | None:
        """Returns what the rank has printed in place of steps. None: it has printed steps, or no line yet."""
        if self.has_steps or not self._without_step:
            return None
        found = preset_of(self._without_step)
        if found is None:
            return StepsMissing(self._without_step[-1], preset="")
        preset, line = found
        return StepsMissing(line, preset)

    @property
    def has_missed_steps(self) -> bool:
        """Whether the rank has printed for a minute, and no step."""
        if self.has_steps or self._first_line_ns is None:
            return False
        return self._last_line_ns - self._first_line_ns >= _PATIENCE_S * NS_PER_S

    def _note_without_step(self, line: str, now_ns: int) -> None:
        """Keeps a line from before the first step, for `steps_missing`."""
        if self._first_line_ns is None:
            self._first_line_ns = now_ns
        self._last_line_ns = now_ns
        self._without_step.append(line)

    def skipped(self, now_ns: int) -> None:
        """Notes that some output was not read. It may have held steps, so the limit counts anew from `now_ns`."""
        if self._since_ns is not None:
            self._since_ns = now_ns
            self._has_read_all = False

    def due_ns(self) -> int | None:
        """Returns when `judge` is to be called next (monotonic nanoseconds). None: no step is expected, or there is no
        limit."""
        if self._limit_ns is None or self._since_ns is None or self._is_overdue:
            return None
        return self._since_ns + self._limit_ns

    def judge(self, now_ns: int) -> None:
        """Applies the limit at `now_ns`. All that the rank printed until then must have been noted before."""
        due_ns = self.due_ns()
        if due_ns is not None and self._since_ns is not None and now_ns >= due_ns:
            self._is_overdue = True
            self._flush_step()
            self._news.append(LogOverdue(self._since_ns))

    def news(self) -> list[News]:
        """Returns the findings since the last call, in their order. Steps since then are joined to one `LogStep`."""
        self._flush_step()
        found, self._news = self._news, []
        return found

    def _note(self, line: LogLine | None, now_ns: int) -> None:
        """Notes a line that a reader understood. None is a line that says nothing of the training."""
        if line is None:
            return
        is_first = not self.has_steps
        self.has_steps = self.has_steps or line.iteration != NO_ITERATION or line.steps > 0
        if not self.has_steps:
            return
        if self._since_ns is not None and self._has_read_all and not self._is_overdue:
            self.intervals.add(now_ns - self._since_ns)
        if line.is_complete:
            self._since_ns = None
        else:
            self._since_ns = now_ns
        self._has_read_all = True
        self._is_overdue = False
        self._at_ns = now_ns
        self._steps = min(self._steps + line.steps, _MAX_STEPS)
        if line.iteration != NO_ITERATION:
            self._iteration = line.iteration
        if line.step_s:
            self._step_s = line.step_s
        if line.loss is not None:
            self._note_loss(line.loss)
        if is_first:
            # The first step is not joined to those after it: it shows at which iteration the training has resumed.
            self._flush_step()

    def _note_loss(self, loss: float) -> None:
        """Notes a printed loss. Only the first of several bad losses in a row is a finding."""
        before, self._is_finite = self._is_finite, math.isfinite(loss)
        if before and not self._is_finite:
            self._flush_step()
            self._news.append(BadLoss(self._iteration, str(loss)))

    def _flush_step(self) -> None:
        """Adds the steps since the last flush as one `LogStep`, if there were any."""
        if self._at_ns is None:
            return
        step_ns = round(self._step_s * NS_PER_S)
        self._news.append(LogStep(self._iteration, self._steps, step_ns, self._at_ns))
        self._at_ns, self._steps, self._step_s = None, 0, 0.0


class Lines:
    """Divides the bytes of one stream of a rank into lines.

    Args:
        within_a_line: whether the stream begins in the middle of a line, whose rest is left out.
    """

    def __init__(self, within_a_line: bool = False) -> None:
        self._open = b""
        self._within_a_line = within_a_line

    def split(self, content: bytes) -> list[str]:
        """Returns the lines that `content` completes, without empty ones. `content` is what was printed since the last
        call."""
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
        """The text after the last line end, so far."""
        return _text(self._open)

    def _with(self, part: bytes) -> bytes:
        """Returns the open line with `part` appended, cut at `MAX_LINE`."""
        return self._open + part[: MAX_LINE - len(self._open)]


def _text(line: bytes) -> str:
    """Returns a line as text without control sequences and outer spaces. Bytes that are not UTF-8 become U+FFFD."""
    text = line.decode(errors="replace")
    if "\x1b" in text:
        text = _CONTROL.sub("", text)
    return text.strip()
