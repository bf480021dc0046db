"""The last samples of one kind of work, and their summaries. Knows no clock and no rank.

`section_timers.py` and `kernels.py` add a sample each time a section or a kernel was timed, in the training's thread.
`detector.py` drains the samples into summaries at each report; `reporting.py` reads the summaries. The unit of a sample
is its owner's: ms for sections, us for kernels.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 8192
"""Samples of one kind that are kept: as an array of doubles 64 KiB. Where more come between two reports, the median of
the last ones is as good."""


class Statistic(str, enum.Enum):
    """What a summary holds: minimum, maximum, median, average, standard deviation and number of the samples.

    STD is the deviation of the samples themselves (divided by NUM, not NUM - 1), so that a single sample has one, too.
    """

    MIN = "MIN"
    MAX = "MAX"
    MED = "MED"
    AVG = "AVG"
    STD = "STD"
    NUM = "NUM"

    __hash__ = str.__hash__  # an Enum's own hash is written in Python, and slow for a key


_IN_ORDER = tuple(Statistic)
Summary: TypeAlias = Mapping[Statistic, float]


class Samples:
    """The last `MAX_SAMPLES` samples. A ring: when it is full, a new sample replaces the oldest."""

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

    def drain(self) -> array[float]:
        """Returns the samples, in no order, and removes them."""
        values = self._values
        self._values = array("d")
        self._oldest = 0
        return values


def summaries(samples: Mapping[str, Samples]) -> dict[str, Summary]:
    """Returns a summary of each kind of work that has samples, in the samples' unit. Removes the samples.

    Kinds with the same number of samples are computed together, as the rows of one table: a hundred kinds of kernels
    cost little more than one.
    """
    values = {name: kept.drain() for name, kept in samples.items()}
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
    """Returns the statistics of each row, in the order of `_IN_ORDER`. Sorts the rows in place.

    Args:
        rows: one row for each kind of work.
        count: the number of samples in each row.
    """
    rows.sort(axis=1)
    mean = np.add.reduce(rows, axis=1) / count
    apart = rows - mean[:, None]
    spread = np.sqrt(np.einsum("ij,ij->i", apart, apart) / count)
    median = (rows[:, (count - 1) // 2] + rows[:, count // 2]) / 2
    columns = (rows[:, 0], rows[:, -1], median, mean, spread, np.full(len(rows), float(count)))
    return zip(*(column.tolist() for column in columns), strict=True)
