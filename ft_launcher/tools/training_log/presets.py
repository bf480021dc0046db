"""Reads single lines as the loggers of known trainings print them, or as the user's expression describes them. Pure.

Called by `rank_log.py`, which makes one reader per rank with `reader` and gives it the lines of both streams of that
rank. The forms are those of the releases that are named beside the recorded lines of the tests
(`tests/data/training_logs/`).

A reader of a bar (`Bars`, `HuggingFace`) has a state: a bar alone does not show whether it belongs to the training, or
whether it has just begun again. All other readers look at one line only.

Lines come from the user's program and may be of any form. Every expression here is linear in the length of the line,
and every number is bounded before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ft_launcher.settings.line_pattern import LinePattern
from rank_monitor.contract.wire.messages import NO_ITERATION

_MEGATRON = re.compile(r"\biteration +(\d+)/ *(\d+) \|")
_MEGATRON_EVALUATION = re.compile(r"^Evaluating iter \d+/\d+|^validation.* loss at ")
_TORCHTITAN = re.compile(r"\b(validate )?step: *(\d+) +loss: *(\S+)")
_NANOGPT = re.compile(r"^iter (\d+): loss ([^\s,]+), time ([\d.]+)ms")
_NANOGPT_EVALUATION = re.compile(r"^step (\d+): train loss ")
_HUGGINGFACE_LOSS = re.compile(r"^\{'loss': '?([^\s,'}]+)")
_MAX_BARS = 16
"""Bars of different lengths that a reader tells apart: one of the training, and a few of evaluations."""
_TOO_MANY = 10**18
"""From here on a number is not taken for an iteration. The product of two printed numbers may not fit into the 64 bits
of a message."""
_LIGHTNING_EPOCH = re.compile(r"^Epoch (\d+)$")
# Each of these reads a line in one pass: no part of an expression can match where its neighbour does, nor a number
# begin within another number.
_BAR = re.compile(r"(?<!\d)\d+%\|[^|]*\| *(\d+)/(\d+) \[([^\]]*)\]")
_WITHOUT_TOTAL = re.compile(r"(?<!\d)(\d+)it \[([^\]]*)\]")
_RATE = re.compile(r"(?<![\d.])([\d.]+)(it/s|s/it)")
_LOSS = re.compile(r"\b(?:train_)?loss(?:_step)?=([^\s,]+)")
# 18 digits always fit into 64 bits. The longest exact form of a float has 24 characters.
_MAX_DIGITS, _MAX_CHARACTERS = 18, 32
_MAX_STEP_S = 1e6
"""Eleven days (seconds): a larger number is not the time of a step."""

HAVE_BARS = frozenset({"lightning", "huggingface", "tqdm"})
"""Presets whose lines are progress bars. A bar is whole before its line ends, so `RankLog` reads it from the open line.
"""


@dataclass(frozen=True)
class LogLine:
    """What one line says of the training. A value that the line does not have keeps its default.

    Attributes:
        iteration: the step, counted through the whole training.
        steps: how many steps were done since the line before, where a line counts steps and not iterations.
        step_s: how long one step takes (seconds); 0: the line does not say.
        loss: may be nan or inf; None: the line has none.
        is_complete: what the line counts is complete (an epoch, the training). No further step is expected for now, so
            the limit rests.
    """

    iteration: int = NO_ITERATION
    steps: int = 0
    step_s: float = 0.0
    loss: float | None = None
    is_complete: bool = False


Reader: TypeAlias = Callable[[str], LogLine | None]
"""Reads one line. Returns None for a line that says nothing of the training. An empty `LogLine` is a sign of progress
without a step, such as a line of an evaluation."""


def _whole_number(text: str | None) -> int:
    """Returns the number in `text`; NO_ITERATION where it is no decimal number of at most 18 digits."""
    if text is None or not text.isdecimal() or len(text) > _MAX_DIGITS:
        return NO_ITERATION
    return int(text)


def _number(text: str | None) -> float | None:
    """Returns the number in `text`, which may be nan or inf; None where it is no number."""
    if text is None or len(text) > _MAX_CHARACTERS:
        return None
    try:
        return float(text.strip(" ,;:'\""))
    except ValueError:
        return None


def _seconds(text: str | None, unit_s: float = 1.0) -> float:
    """Returns the time of a step in seconds, 0 where `text` is no plausible time.

    Args:
        unit_s: the unit of the number in the text (seconds): 1e-3 for milliseconds.
    """
    found = _number(text)
    if found is None or not math.isfinite(found) or not 0 < found * unit_s < _MAX_STEP_S:
        return 0.0
    return found * unit_s


def reader(watch_log: str) -> Reader:
    """Returns a new reader for the lines of one rank.

    Args:
        watch_log: the value of `--ft-watch-log`, which was checked when the settings were read.
    """
    match watch_log:
        case "megatron":
            return _megatron
        case "torchtitan":
            return _torchtitan
        case "nanogpt":
            return _nanogpt
        case "lightning":
            return _lightning
        case "huggingface":
            return HuggingFace().read
        case "tqdm":
            return Bars().read
    return _of_expression(watch_log)


def _megatron(line: str) -> LogLine | None:
    """Reads Megatron-LM's line: `iteration 10/ 100 | consumed samples: ... | lm loss: 6.9E+00 | ...`."""
    match = _MEGATRON.search(line)
    if match is None:
        if _MEGATRON_EVALUATION.match(line):
            return LogLine()
        return None
    fields: dict[str, str] = {}
    for part in line[match.end() :].split("|"):
        name, colon, value = part.rpartition(":")
        if colon:
            fields[name.strip()] = value.strip()
    iteration, total = _whole_number(match[1]), _whole_number(match[2])
    loss = next((_number(value) for name, value in fields.items() if name.endswith("loss")), None)
    # Megatron skips an iteration with a loss that is not finite, and leaves that loss out of the printed mean. Only
    # this count shows it.
    if _whole_number(fields.get("number of nan iterations")) > 0:
        loss = float("nan")
    step_s = _seconds(fields.get("elapsed time per iteration (ms)"), 1e-3)
    return LogLine(iteration, step_s=step_s, loss=loss, is_complete=iteration >= total > 0)


def _torchtitan(line: str) -> LogLine | None:
    """Reads torchtitan's line: `step: 10  loss: 7.8  memory: ...`, and the line at the end of its training."""
    match = _TORCHTITAN.search(line)
    if match is not None:
        if match[1]:  # `validate step:` is no training step, and its loss is not judged
            return LogLine()
        return LogLine(_whole_number(match[2]), loss=_number(match[3]))
    if line.endswith("Training completed"):
        return LogLine(is_complete=True)
    return None


def _nanogpt(line: str) -> LogLine | None:
    """Reads nanoGPT's line: `iter 10: loss 4.2, time 120.50ms, mfu 1.2%`. A line of an evaluation begins with
    `step`."""
    match = _NANOGPT.match(line)
    if match is not None:
        return LogLine(_whole_number(match[1]), step_s=_seconds(match[3], 1e-3), loss=_number(match[2]))
    if _NANOGPT_EVALUATION.match(line):
        return LogLine()
    return None


@dataclass(frozen=True)
class ProgressBar:
    """A progress bar of tqdm, as printed: `Epoch 0:  50%|##### | 4/8 [00:01<00:01, 3.97it/s, loss=0.5]`.

    Each preset decides which bars belong to the training.

    Attributes:
        title: what stands before the bar, without its colon; here `Epoch 0`.
        total: 0 where the bar has none.
        step_s: seconds for each unit; 0 where the bar says nothing of its speed.
        loss: from the facts in brackets; None where they have none.
    """

    title: str
    done: int
    total: int
    step_s: float
    loss: float | None

    @property
    def is_complete(self) -> bool:
        """Whether the bar has reached its total."""
        return 0 < self.total <= self.done


def _progress_bar(line: str) -> ProgressBar | None:
    """Returns the bar in a line. None: there is no bar, or it is not printed to its end yet."""
    if "[" not in line:
        return None
    match = _BAR.search(line)
    if match is not None:
        done, total, facts = _whole_number(match[1]), _whole_number(match[2]), match[3]
    else:
        match = _WITHOUT_TOTAL.search(line)
        if match is None:
            return None
        done, total, facts = _whole_number(match[1]), 0, match[2]
    if NO_ITERATION in (done, total):
        return None
    loss = _LOSS.search(facts)
    return ProgressBar(
        title=line[: match.start()].strip().rstrip(":").rstrip(),
        done=done,
        total=total,
        step_s=_step_s(facts),
        loss=None if loss is None else _number(loss[1]),
    )


def _step_s(facts: str) -> float:
    """Returns seconds for each step from `3.97it/s` or `1.20s/it`; 0 where neither is there."""
    match = _RATE.search(facts)
    if match is None:
        return 0.0
    if match[2] == "s/it":
        return _seconds(match[1])
    a_second = _number(match[1])
    if not a_second:
        return 0.0
    return _seconds(str(1 / a_second))


class Bars:
    """Reads any bar of tqdm (preset `tqdm`).

    The count of such a bar begins again with each epoch, so it is no iteration of the training: a reader reports how
    many steps were done since the same bar was read last.
    """

    def __init__(self) -> None:
        self._before: ProgressBar | None = None

    def read(self, line: str) -> LogLine | None:
        """Reads one line. The first line of a bar counts no steps, since it is not known how many of them are new."""
        bar = _progress_bar(line)
        if bar is None:
            return None
        before, self._before = self._before, bar
        steps = 0
        if before is not None and (before.title, before.total) == (bar.title, bar.total):
            steps = max(0, bar.done - before.done)
        return LogLine(steps=steps, step_s=bar.step_s, loss=bar.loss, is_complete=bar.is_complete)


def _lightning(line: str) -> LogLine | None:
    """Reads a bar of Lightning's `TQDMProgressBar`. All epochs have the same length, so epoch and count give the
    iteration."""
    bar = _progress_bar(line)
    if bar is None:
        if "`Trainer.fit` stopped" in line:
            return LogLine(is_complete=True)
        return None
    epoch = _LIGHTNING_EPOCH.match(bar.title)
    if epoch is None:  # the bar of a validation, or of the check before the training
        return LogLine(is_complete=bar.is_complete)
    iteration, number_of_epoch = NO_ITERATION, _whole_number(epoch[1])
    # A bar with 0 done may be the bar of the epoch before, which is printed once more when it is set back.
    if bar.done and number_of_epoch != NO_ITERATION and (number_of_epoch == 0 or bar.total):
        iteration = number_of_epoch * bar.total + bar.done
    if iteration >= _TOO_MANY:
        iteration = NO_ITERATION
    return LogLine(iteration, step_s=bar.step_s, loss=bar.loss, is_complete=bar.is_complete)


class HuggingFace:
    """Reads what the Trainer of transformers prints: bars, and a dictionary for each log.

    The training's bar has no title, and counts global steps, also after a resume. Evaluations have bars of their own,
    without a title as well, so bars are told apart by their totals.
    """

    def __init__(self) -> None:
        self._done: dict[int, int] = {}
        self._began_anew: set[int] = set()

    def read(self, line: str) -> LogLine | None:
        """Reads one line."""
        bar = _progress_bar(line)
        if bar is not None:
            iteration = NO_ITERATION
            # After a resume the bar begins with 0, too. The first step that follows shows where the training is.
            if self._is_of_training(bar) and bar.done:
                iteration = bar.done
            step_s = bar.step_s if iteration != NO_ITERATION else 0.0
            return LogLine(iteration, step_s=step_s, is_complete=bar.is_complete)
        match = _HUGGINGFACE_LOSS.match(line)
        if match is not None:
            return LogLine(loss=_number(match[1]))
        if line.startswith("{'eval_"):
            return LogLine()
        if line.startswith("{'train_runtime'"):
            return LogLine(is_complete=True)
        return None

    def _is_of_training(self, bar: ProgressBar) -> bool:
        """Returns whether `bar` counts training steps.

        Candidates have no title and never began again at 0, as the bar of an evaluation does. The one with the largest
        total wins: a training has more steps than one evaluation.
        """
        if bar.title or not bar.total:
            return False
        if bar.done < self._done.get(bar.total, 0):
            self._began_anew.add(bar.total)
        self._done[bar.total] = bar.done
        if len(self._done) > _MAX_BARS:
            del self._done[min(self._done)]
        return bar.total == max(self._done.keys() - self._began_anew, default=0)


def _of_expression(text: str) -> Reader:
    """Returns a reader for the user's expression, which is searched for in each line.

    Its named groups `iteration`, `loss` and `step_time` are read. Without a group `iteration` each matching line counts
    as one step: the limit and the check of the loss begin with the first step, so something must count.

    Raises:
        ImportError: google-re2 is not installed.
        ValueError: RE2 refuses the expression. Both were checked before the job began.
    """
    pattern = LinePattern(text)
    steps = int("iteration" not in pattern.names)

    def read(line: str) -> LogLine | None:
        found = pattern.search(line)
        if found is None:
            return None
        return LogLine(
            _whole_number(found.get("iteration")),
            steps=steps,
            step_s=_seconds(found.get("step_time")),
            loss=_number(found.get("loss")),
        )

    return read


_WITH_NUMBERS = ("megatron", "torchtitan", "nanogpt", "lightning")
"""Presets whose lines cannot be confused with those of another program. The other two read bars of tqdm, which many
programs print."""


def preset_of(lines: Sequence[str]) -> tuple[str, str] | None:
    """Returns the preset that finds steps in the lines of a rank, and a line with a step. None: no preset finds any.

    Called for `StepsMissing`, to tell the user which preset to name.
    """
    for preset in _WITH_NUMBERS:
        read = reader(preset)
        for line in lines:
            found = read(line)
            if found is not None and found.iteration != NO_ITERATION:
                return preset, line
    bar = next((line for line in lines if _progress_bar(line) is not None), None)
    if bar is None:
        return None
    if any(_HUGGINGFACE_LOSS.match(line) for line in lines):
        return "huggingface", bar
    return "tqdm", bar
