"""The last samples of one kind of work, and what is said of them. Knows no clock and no rank."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

MAX_SAMPLES = 8192


class Statistic(str, enum.Enum):
    """What a summary holds. STD is that of the samples themselves (divided by NUM), so that one sample has one too."""

    MIN = "MIN"
    MAX = "MAX"
    MED = "MED"
    AVG = "AVG"
    STD = "STD"
    NUM = "NUM"


Summary: TypeAlias = Mapping[Statistic, float]


class Samples:
    """The last `MAX_SAMPLES` samples."""

    __slots__ = ("_oldest", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._oldest = 0

    def add(self, value: float) -> None:
        """Notes one; the oldest goes when there is no room."""
        if len(self._values) < MAX_SAMPLES:
            self._values.append(value)
        else:
            self._values[self._oldest] = value
            self._oldest = (self._oldest + 1) % MAX_SAMPLES

    def taken(self) -> dict[Statistic, float]:
        """The summary, in the unit of the samples, empty when there are none; none are left."""
        values, self._values, self._oldest = self._values, array("d"), 0
        count = len(values)
        if not count:
            return {}
        ordered = np.sort(np.frombuffer(values))
        mean = float(np.add.reduce(ordered)) / count
        apart = ordered - mean
        return {
            Statistic.MIN: float(ordered[0]),
            Statistic.MAX: float(ordered[-1]),
            Statistic.MED: float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2,
            Statistic.AVG: mean,
            Statistic.STD: math.sqrt(float(apart @ apart) / count),
            Statistic.NUM: float(count),
        }
