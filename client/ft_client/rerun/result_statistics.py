"""Statistics of results: the largest per context, and how far reruns differ from first runs.

`state_machine.py` asks `LargestSeen` for `is_unexpectedly_large`; `validation.py` collects the differences of reruns in
`Variability`, in mode `report_stats`. Each rank has its own statistics: no group is known here.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

KEPT = 8192
"""How many differences are kept for each location in the program: the last ones, so that memory is bounded."""


@dataclass
class Largest:
    """The maximum of the first samples of a context."""

    maximum: float = 0.0
    samples: int = 0


class LargestSeen:
    """The largest magnitude among the first samples of each context: what "unexpectedly large" is measured by."""

    def __init__(self) -> None:
        self._contexts: dict[str, Largest] = {}

    def is_large(
        self, value: float, threshold: float, context: str, num_samples: int, resample: bool, count: bool
    ) -> bool:
        """Returns whether |value| is above threshold x maximum. NaN and infinities are not large, and are no samples.

        While samples are collected, nothing is large. A maximum of 0 is no measure either.

        Args:
            value: the result.
            threshold: how many times the maximum is still expected.
            context: names the kind of result.
            num_samples: how many results are samples.
            resample: whether to drop the samples of this context first.
            count: whether this value may be a sample. In a rerun the value of the first run was one already.
        """
        if resample and count:
            self._contexts.pop(context, None)
        if not math.isfinite(value):
            return False
        seen = self._contexts.setdefault(context, Largest())
        if seen.samples < num_samples:
            if count:
                seen.samples += 1
                seen.maximum = max(seen.maximum, abs(value))
            return False
        return 0 < seen.maximum * threshold < abs(value)

    def state_dict(self) -> dict[str, Any]:
        """Returns the samples' maximum and number, by context, for a checkpoint."""
        return {context: asdict(seen) for context, seen in self._contexts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` wrote."""
        self._contexts = {context: Largest(**seen) for context, seen in state_dict.items()}


class Variability:
    """Differences between a first run and its rerun, by location in the program, and when to log them."""

    def __init__(self) -> None:
        self._differences: dict[str, deque[float]] = {}
        self._reruns = 0

    def add(self, place: str, apart: float) -> None:
        """Adds one difference.

        Args:
            place: file and line of the check, with its message.
            apart: the distance of the two results.
        """
        self._differences.setdefault(place, deque(maxlen=KEPT)).append(apart)

    def is_due(self) -> bool:
        """Counts a rerun; returns whether it is the first, the tenth or a hundredth. The same on every rank."""
        self._reruns += 1
        return self._reruns in {1, 10} or self._reruns % 100 == 0

    def to_text(self, rank: int) -> str:
        """Returns the differences of this rank as a text to send to the other ranks."""
        return json.dumps([rank, {place: list(seen) for place, seen in self._differences.items()}])

    def report(self, texts: Iterable[str]) -> list[str]:
        """Returns one line for each location, over all ranks.

        Args:
            texts: what `to_text` returned on each rank.
        """
        pooled: dict[str, list[float]] = {}
        for _, places in map(json.loads, texts):
            for place, seen in places.items():
                pooled.setdefault(place, []).extend(seen)
        head = f"Variability of results after {self._reruns} reruns"
        return [f"{head}: {place} samples={len(seen)} {summary(seen)}" for place, seen in sorted(pooled.items())]


def summary(differences: Iterable[float]) -> str:
    """Gives avg, p50, p90, p99, p99.9 and max of at least one difference, in one line. Percentiles are seen values."""
    values = np.array(list(differences))
    wanted = np.percentile(values, [50, 90, 99, 99.9], method="inverted_cdf")
    shown = dict(zip(("avg", "p50", "p90", "p99", "p99.9", "max"), (values.mean(), *wanted, values.max()), strict=True))
    return " ".join(f"{name}={value:.6g}" for name, value in shown.items())
