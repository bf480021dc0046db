"""The last samples of one kind of work, and their summaries. Knows no clock and no rank.

`section_timers.py` and `kernels.py` add to it, `reporting.py` reads it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# As an array of doubles 64 KiB. A training with more in one report needs no older ones for a median.
MAX_SAMPLES = 8192


class Statistic(str, enum.Enum):
    """What a summary holds. STD is that of the samples themselves (divided by NUM), so that one sample has one too."""

    MIN = "MIN"
    MAX = "MAX"
    MED = "MED"
    AVG = "AVG"
    STD = "STD"
    NUM = "NUM"

    __hash__ = str.__hash__  # an Enum's own is written in Python


_IN_ORDER = tuple(Statistic)
Summary: TypeAlias = Mapping[Statistic, float]


class Samples:
    """The last `MAX_SAMPLES` samples."""

    __slots__ = ("_oldest", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._oldest = 0

    def add(self, value: float) -> None:
        """Adds a sample, in place of the oldest when there is no room."""
        if len(self._values) < MAX_SAMPLES:
            self._values.append(value)
        else:
            self._values[self._oldest] = value
            self._oldest = (self._oldest + 1) % MAX_SAMPLES

    def taken(self) -> array[float]:
        """Returns the samples, in no order, and removes them."""
        values = self._values
        self._values = array("d")
        self._oldest = 0
        return values


def summaries(samples: Mapping[str, Samples]) -> dict[str, Summary]:
    """Returns the summary of each that has samples, in their unit, and removes the samples.

    Those with as many samples are the rows of one table: a hundred kinds of kernels cost little more than one.
    """
    values = {name: kept.taken() for name, kept in samples.items()}
    names_by_count: dict[int, list[str]] = {}
    for name, taken in values.items():
        names_by_count.setdefault(len(taken), []).append(name)
    names_by_count.pop(0, None)
    found: dict[str, Summary] = {}
    for count, names in names_by_count.items():
        columns = _columns(np.array([values[name] for name in names]), count)
        found.update((name, dict(zip(_IN_ORDER, row, strict=True))) for name, row in zip(names, columns, strict=True))
    return {name: found[name] for name in values if name in found}


def _columns(rows: NDArray[np.float64], count: int) -> Iterator[tuple[float, ...]]:
    """Returns the statistics of each row, in the order of `_IN_ORDER`."""
    rows.sort(axis=1)
    mean = np.add.reduce(rows, axis=1) / count
    apart = rows - mean[:, None]
    spread = np.sqrt(np.einsum("ij,ij->i", apart, apart) / count)
    median = (rows[:, (count - 1) // 2] + rows[:, count // 2]) / 2
    columns = (rows[:, 0], rows[:, -1], median, mean, spread, np.full(len(rows), float(count)))
    return zip(*(column.tolist() for column in columns), strict=True)
