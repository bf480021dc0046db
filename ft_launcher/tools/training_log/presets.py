"""How the loggers of known trainings print a step: a reader for each, and one for an expression of the user's. Pure.

Called by `rank_log.py`. Each reads the lines of one rank, of both its streams. Their forms are those of the releases
that are named at the tests' recorded lines (`tests/data/training_logs/`).
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
"""Lengths of bars that are told apart: one of the training, a few of evaluations."""
_TOO_MANY = 10**18
"""No iteration: the product of two numbers may not fit into 64 bits."""
_LIGHTNING_EPOCH = re.compile(r"^Epoch (\d+)$")
# No part can match where its neighbour does, nor a number begin within one, so each line is read in one pass.
_BAR = re.compile(r"(?<!\d)\d+%\|[^|]*\| *(\d+)/(\d+) \[([^\]]*)\]")
_WITHOUT_TOTAL = re.compile(r"(?<!\d)(\d+)it \[([^\]]*)\]")
_RATE = re.compile(r"(?<![\d.])([\d.]+)(it/s|s/it)")
_LOSS = re.compile(r"\b(?:train_)?loss(?:_step)?=([^\s,]+)")
# 18 digits always fit into 64 bits; the longest exact form of a float has 24 characters.
_MAX_DIGITS, _MAX_CHARACTERS = 18, 32
_MAX_STEP_S = 1e6
"""Eleven days: more is no time of a step."""

HAVE_BARS = frozenset({"lightning", "huggingface", "tqdm"})
"""Presets whose lines are bars, which are whole before their line ends."""


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


def _whole_number(text: str | None) -> int:
    """Returns the number in a text, NO_ITERATION when it is none."""
    if text is None or not text.isdecimal() or len(text) > _MAX_DIGITS:
        return NO_ITERATION
    return int(text)


def _number(text: str | None) -> float | None:
    """Returns the number in a text, which may be nan or inf; None when it is none."""
    if text is None or len(text) > _MAX_CHARACTERS:
        return None
    try:
        return float(text.strip(" ,;:'\""))
    except ValueError:
        return None


def _seconds(text: str | None, unit_s: float = 1.0) -> float:
    """Returns a time of a step in seconds, 0 when the text is none."""
    found = _number(text)
    if found is None or not math.isfinite(found) or not 0 < found * unit_s < _MAX_STEP_S:
        return 0.0
    return found * unit_s


def reader(watch_log: str) -> Reader:
    """Returns the reader of a rank's lines for the value of `--ft-watch-log`, which was checked before."""
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
    # An iteration with such a loss is skipped, and its loss left out of the mean.
    if _whole_number(fields.get("number of nan iterations")) > 0:
        loss = float("nan")
    step_s = _seconds(fields.get("elapsed time per iteration (ms)"), 1e-3)
    return LogLine(iteration, step_s=step_s, loss=loss, is_complete=iteration >= total > 0)


def _torchtitan(line: str) -> LogLine | None:
    match = _TORCHTITAN.search(line)
    if match is not None:
        if match[1]:  # A validation is no training step, and its loss is not judged.
            return LogLine()
        return LogLine(_whole_number(match[2]), loss=_number(match[3]))
    if line.endswith("Training completed"):
        return LogLine(is_complete=True)
    return None


def _nanogpt(line: str) -> LogLine | None:
    match = _NANOGPT.match(line)
    if match is not None:
        return LogLine(_whole_number(match[1]), step_s=_seconds(match[3], 1e-3), loss=_number(match[2]))
    if _NANOGPT_EVALUATION.match(line):
        return LogLine()
    return None


@dataclass(frozen=True)
class ProgressBar:
    """A progress bar of tqdm, as printed: `Epoch 0:  50%|##### | 4/8 [00:01<00:01, 3.97it/s, loss=0.5]`.

    `total` is 0 where it has none; `step_s` 0 where it says nothing of the speed. Which bars are of the training, each
    preset decides.
    """

    title: str
    done: int
    total: int
    step_s: float
    loss: float | None

    @property
    def is_complete(self) -> bool:
        """Whether all of it is done."""
        return 0 < self.total <= self.done


def _progress_bar(line: str) -> ProgressBar | None:
    """Returns the bar in a line; None: there is none, or it is not whole yet."""
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
    """Any bar of tqdm. Its count begins anew with each epoch, so it is no iteration of the training."""

    def __init__(self) -> None:
        self._before: ProgressBar | None = None

    def read(self, line: str) -> LogLine | None:
        """Reads one line."""
        bar = _progress_bar(line)
        if bar is None:
            return None
        before, self._before = self._before, bar
        steps = 0
        if before is not None and (before.title, before.total) == (bar.title, bar.total):
            steps = max(0, bar.done - before.done)
        return LogLine(steps=steps, step_s=bar.step_s, loss=bar.loss, is_complete=bar.is_complete)


def _lightning(line: str) -> LogLine | None:
    """Reads the bars of `TQDMProgressBar`. The iteration counts through all epochs, which have the same length."""
    bar = _progress_bar(line)
    if bar is None:
        if "`Trainer.fit` stopped" in line:
            return LogLine(is_complete=True)
        return None
    epoch = _LIGHTNING_EPOCH.match(bar.title)
    if epoch is None:  # of a validation or a check before the training
        return LogLine(is_complete=bar.is_complete)
    iteration, number_of_epoch = NO_ITERATION, _whole_number(epoch[1])
    # With 0 done it may be the bar of the epoch before, which is shown once more when it is set back.
    if bar.done and number_of_epoch != NO_ITERATION and (number_of_epoch == 0 or bar.total):
        iteration = number_of_epoch * bar.total + bar.done
    if iteration >= _TOO_MANY:
        iteration = NO_ITERATION
    return LogLine(iteration, step_s=bar.step_s, loss=bar.loss, is_complete=bar.is_complete)


class HuggingFace:
    """The Trainer of transformers: a bar without a title for the training, others for evaluations, and a dictionary
    for each log. The training's bar has the global step, also after a resume."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}
        self._began_anew: set[int] = set()

    def read(self, line: str) -> LogLine | None:
        """Reads one line."""
        bar = _progress_bar(line)
        if bar is not None:
            iteration = NO_ITERATION
            # After a resume, too, it begins with 0: the first step that follows says where the training is.
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
        """Whether a bar is the training's: of those without a title that never began anew, the one with most steps."""
        if bar.title or not bar.total:
            return False
        if bar.done < self._done.get(bar.total, 0):
            self._began_anew.add(bar.total)
        self._done[bar.total] = bar.done
        if len(self._done) > _MAX_BARS:
            del self._done[min(self._done)]
        return bar.total == max(self._done.keys() - self._began_anew, default=0)


def _of_expression(text: str) -> Reader:
    """Returns the reader for an expression of the user's, which is searched for in each line.

    Without a group `iteration` each line with a match counts as one step: a limit and a loss need steps to begin with.
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
"""Presets of which a line alone shows that it is theirs. Any bar of tqdm could be one of the other two."""


def preset_of(lines: Sequence[str]) -> tuple[str, str] | None:
    """Returns the preset that finds steps in the lines of a rank, and a line in which it does; None: no preset does."""
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
