"""What a scenario is and what its runs give. Knows nothing of launchers' flags or of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .launchers import Launcher


@dataclass
class Outcome:
    """Values per metric (the name ends in its unit) of all runs of one launcher, and what went wrong.

    `tried` is how many values each metric should have.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    tried: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, metric: str, value: float) -> None:
        """Note one value."""
        self.values.setdefault(metric, []).append(value)

    def add_percentiles(self, name: str, took_ns: Sequence[int]) -> None:
        """Note p50 and p99 of `took_ns`, in microseconds."""
        ordered = sorted(took_ns)
        for percent in (50, 99):
            self.add(f"{name}_p{percent}_us", ordered[len(ordered) * percent // 100] / 1000)


@dataclass(frozen=True)
class Scenario:
    """One part of the table.

    `once` runs one job of a launcher with so many ranks; `floor` measures what nothing can be faster than; `variants`
    are the launchers that take part, by the name of the launcher that was asked for; `trials` is how many values of a
    metric one run gives.
    """

    keys: tuple[str, ...]
    title: str
    marks: str
    sizes: Sequence[int]
    once: Callable[[Launcher, int, Outcome], None]
    floor: Callable[[int, Outcome], None]
    variants: Mapping[str, Sequence[Launcher]]
    trials: int = 1


Results = Mapping[tuple[int, str], Outcome]
"""By (ranks, name of the launcher)."""
