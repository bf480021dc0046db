"""Decides when a fault strikes, from the steps and sections of the training and the time. Pure.

`drill.py` asks it. Every condition that was asked for must hold: the delay is over, the step was reached, the section
begins, the dice say so. A fault strikes once in a process.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from rank_monitor.contract.settings.injection import Injection


class Source(enum.IntEnum):
    """Where the number of the training's step comes from, the best last. The best that this process has seen counts."""

    HEARTBEATS = 0
    OPTIMIZER_STEPS = 1
    STEP_SECTIONS = 2
    ITERATIONS = 3


class StepCount:
    """Counts the training's steps. Iterations are taken as reported; the first of any other source is step 1."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._seen: Counter[object] = Counter()
        self._step = 0

    def reached(self, source: Source, iteration: int | None = None, who: object = None) -> range | None:
        """Returns the steps that the training has just reached; None where a better source counts.

        Several are due where iterations are reported now and then. After a change of the source, or a step back, it
        is only the new one: what lies between was not trained here.

        Args:
            who: one of several that count by themselves, such as two optimizers; the one ahead counts.
        """
        if self._source is not None and source < self._source:
            return None
        if iteration is None:
            self._seen[source, who] += 1
            if source == self._source:
                before = self._step
            else:
                before = 0
            iteration = max(self._seen[source, who], before)
        if (source, iteration) == (self._source, self._step):
            return None
        first = iteration
        if source == self._source and self._step < iteration:
            first = self._step + 1
        steps = range(first, iteration + 1)
        self._source = source
        self._step = iteration
        return steps


@dataclass
class Trigger:
    """Decides for one fault.

    `dice` is a generator for this fault alone; `began_s` is when this rank began (monotonic seconds).
    """

    fault: Injection
    dice: random.Random
    began_s: float
    struck: bool = False
    _delay_s: float = field(init=False)
    _reached: bool = field(init=False)

    def __post_init__(self) -> None:
        mtbf_s = self.fault.mtbf_s
        if mtbf_s is None:
            self._delay_s = self.fault.delay_s or 0.0
        else:
            self._delay_s = self.dice.expovariate(1 / mtbf_s)
        self._reached = self.fault.step is None

    @property
    def by_time_s(self) -> float | None:
        """The delay in seconds after which it strikes, where nothing but time counts; else None."""
        fault = self.fault
        waits = fault.section is not None or fault.step is not None or fault.probability is not None
        if waits:
            return None
        return self._delay_s

    def on_step(self, steps: Container[int], now_s: float) -> bool:
        """Returns whether the fault strikes at these steps, which the training has just reached."""
        if self.fault.step in steps:
            self._reached = True
        return self.fault.section is None and self._strikes(now_s)

    def on_section(self, name: str, now_s: float) -> bool:
        """Returns whether the fault strikes in this section, which was just opened."""
        return name == self.fault.section and self._strikes(now_s)

    def _strikes(self, now_s: float) -> bool:
        if self.struck or not self._reached or now_s < self.began_s + self._delay_s:
            return False
        probability = self.fault.probability
        self.struck = probability is None or self.dice.random() < probability
        return self.struck
