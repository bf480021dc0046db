"""A progress bar of tqdm, as printed: `Epoch 0:  50%|##### | 4/8 [00:01<00:01, 3.97it/s, loss=0.5]`. Pure.

The presets read a line by it. It knows no training: which bar counts as one, the preset decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ft_launcher.training_log.log_line import number, seconds, whole_number
from rank_monitor.contract.wire.messages import NO_ITERATION

# No part can match where its neighbour does, nor a number begin within one, so each line is read in one pass.
_BAR = re.compile(r"(?<!\d)\d+%\|[^|]*\| *(\d+)/(\d+) \[([^\]]*)\]")
_WITHOUT_TOTAL = re.compile(r"(?<!\d)(\d+)it \[([^\]]*)\]")
_RATE = re.compile(r"(?<![\d.])([\d.]+)(it/s|s/it)")
_LOSS = re.compile(r"\b(?:train_)?loss(?:_step)?=([^\s,]+)")


@dataclass(frozen=True)
class ProgressBar:
    """One bar. `total` is 0 where it has none; `step_s` 0 where it says nothing of the speed."""

    title: str
    done: int
    total: int
    step_s: float
    loss: float | None

    @property
    def is_complete(self) -> bool:
        """Whether all of it is done."""
        return 0 < self.total <= self.done


def progress_bar(line: str) -> ProgressBar | None:
    """Returns the bar in a line; None: there is none, or it is not whole yet."""
    if "[" not in line:
        return None
    match = _BAR.search(line)
    if match is not None:
        done, total, facts = whole_number(match[1]), whole_number(match[2]), match[3]
    else:
        match = _WITHOUT_TOTAL.search(line)
        if match is None:
            return None
        done, total, facts = whole_number(match[1]), 0, match[2]
    if NO_ITERATION in (done, total):
        return None
    loss = _LOSS.search(facts)
    return ProgressBar(
        title=line[: match.start()].strip().rstrip(":").rstrip(),
        done=done,
        total=total,
        step_s=_step_s(facts),
        loss=None if loss is None else number(loss[1]),
    )


def _step_s(facts: str) -> float:
    match = _RATE.search(facts)
    if match is None:
        return 0.0
    if match[2] == "s/it":
        return seconds(match[1])
    a_second = number(match[1])
    if not a_second:
        return 0.0
    return seconds(str(1 / a_second))
