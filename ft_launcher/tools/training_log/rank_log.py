"""What a rank has printed of its training, and for how long it has printed no step. Pure: lines and the time in.

    no step yet --step--> counting --`is_complete`--> resting --step--> counting
                             | the limit has passed
                          overdue --step--> counting

While there is no step yet, the last lines are kept: where a rank prints for a minute and none of its lines is a step,
the preset or the expression may be that of another program (`StepsMissing`).

Called by `log_watch.py`. The limit counts from the first step on: how long a training needs until then is not known. It
rests while what the lines count is complete: an epoch is over, and nobody knows for how long.

`Lines` divides what a rank prints: `\\n` and `\\r` end a line, and its colours are removed. A rank may print anything:
a line is cut at `MAX_LINE` bytes, and no more is kept of one without an end.
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
# What a message can hold: it fits into 64 bits.
_MAX_STEPS = 10**18
MAX_LINE = 4096
"""Bytes of a line that are read. Ten times a line of Megatron with all its fields."""
_END = re.compile(rb"[\r\n]")
# Colours, and the movements of the cursor by which progress bars stand below each other (ECMA-48, control sequences).
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PATIENCE_S = 60.0
"""Seconds from the first printed line to the one at which steps are missing. A training prints its settings within a
minute; what it does before its first step (compilation, a download) it mostly does in silence."""
_KEPT_LINES = 100
"""Of those before the first step. Between two steps a program prints far less than that."""


@dataclass(frozen=True)
class BadLoss:
    """A loss that is not a finite number: `nan`, `inf` or `-inf`; `iteration` may be NO_ITERATION."""

    iteration: int
    loss: str


@dataclass(frozen=True)
class StepsMissing:
    """A rank has printed for a minute, and none of its lines was a step.

    `line`: one that it printed. `preset`: the preset that finds a step in that line; empty: none does.
    """

    line: str
    preset: str


News: TypeAlias = LogStep | LogOverdue | BadLoss | StepsMissing


class RankLog:
    """The log of one rank.

    Args:
        watch_log: as in the setting of that name.
        limit_s: from one step to the next; None: no limit.
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
        """Whether any line was one of a step."""
        self.intervals = Durations()
        """From one line of a step to the next, where the limit counts or would. As exact as the lines are read; without
        those of which a part was not read, or that the limit ended."""
        self._has_read_all = True
        self._without_step: deque[str] = deque(maxlen=_KEPT_LINES)
        self._first_line_ns: int | None = None
        self._last_line_ns = 0

    def note_lines(self, lines: Iterable[str], open_line: str, now_ns: int) -> None:
        """Takes the lines of one stream that were read at `now_ns`, and the line there that has no end yet."""
        for line in lines:
            self._note(self._read(line), now_ns)
            if self.has_steps:
                self._without_step.clear()
            else:
                self._note_without_step(line, now_ns)
        if self._has_bars and open_line.endswith("]"):
            self._note(self._read(open_line), now_ns)

    def steps_missing(self) -> StepsMissing | None:
        """Returns what the rank has printed in place of steps; None: it has printed steps, or no line yet."""
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
        if self._first_line_ns is None:
            self._first_line_ns = now_ns
        self._last_line_ns = now_ns
        self._without_step.append(line)

    def skipped(self, now_ns: int) -> None:
        """Some of what the rank printed was not read, and may have had steps: the limit counts anew."""
        if self._since_ns is not None:
            self._since_ns = now_ns
            self._has_read_all = False

    def due_ns(self) -> int | None:
        """When `judge` should be called; None: no step is expected."""
        if self._limit_ns is None or self._since_ns is None or self._is_overdue:
            return None
        return self._since_ns + self._limit_ns

    def judge(self, now_ns: int) -> None:
        """Applies the limit. All that the rank printed until `now_ns` must have been taken."""
        due_ns = self.due_ns()
        if due_ns is not None and self._since_ns is not None and now_ns >= due_ns:
            self._is_overdue = True
            self._flush_step()
            self._news.append(LogOverdue(self._since_ns))

    def news(self) -> list[News]:
        """Returns what was found since the last call, in its order. Steps are joined to one."""
        self._flush_step()
        found, self._news = self._news, []
        return found

    def _note(self, line: LogLine | None, now_ns: int) -> None:
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
            # Not joined to those after it: it says where the training has resumed.
            self._flush_step()

    def _note_loss(self, loss: float) -> None:
        before, self._is_finite = self._is_finite, math.isfinite(loss)
        if before and not self._is_finite:
            self._flush_step()
            self._news.append(BadLoss(self._iteration, str(loss)))

    def _flush_step(self) -> None:
        if self._at_ns is None:
            return
        step_ns = round(self._step_s * NS_PER_S)
        self._news.append(LogStep(self._iteration, self._steps, step_ns, self._at_ns))
        self._at_ns, self._steps, self._step_s = None, 0, 0.0


class Lines:
    """The lines of one stream of a rank.

    Args:
        within_a_line: whether it begins somewhere in one, whose rest is left out.
    """

    def __init__(self, within_a_line: bool = False) -> None:
        self._open = b""
        self._within_a_line = within_a_line

    def split(self, content: bytes) -> list[str]:
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
