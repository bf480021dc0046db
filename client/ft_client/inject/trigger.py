"""Decides when a fault is injected, from the steps and sections of the training and the time. Pure.

`requested_faults.py` makes one `Trigger` for each fault, and asks it at each step and at the start of each section. A
fault is due when every condition that it names holds:

- its delay is over;
- its step was reached;
- its section begins;
- the dice say so, where it names a probability.

A fault fires once in a process.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from rank_monitor.contract.settings.injection import Injection


class Source(enum.IntEnum):
    """Where the number of the training's step comes from, the best source last.

    Several sources may report one and the same training. Only the best that this process has seen counts.
    """

    HEARTBEATS = 0
    OPTIMIZER_STEPS = 1
    STEP_SECTIONS = 2
    ITERATIONS = 3


class StepCount:
    """Counts the training's steps.

    A reported iteration is the number of the step. Of any other source, the first report is step 1.
    """

    def __init__(self) -> None:
        self._source: Source | None = None
        self._seen: Counter[object] = Counter()
        self._step = 0

    def reached(self, source: Source, iteration: int | None = None, who: object = None) -> range | None:
        """Returns the steps that the training has just reached; None: none, or a better source counts.

        Where a script reports its iteration only now and then, several steps are reached at once. After a change of the
        source, or a step back, only the new step is: what lies between was not trained here.

        Args:
            source: who reports.
            iteration: the number of the step; None: the source's next.
            who: which of several that count by themselves, such as two optimizers. The one ahead counts.
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
    """Decides when one fault is injected.

    Attributes:
        fault: the fault, with its conditions.
        dice: a random generator for this fault alone.
        began_s: when this rank began (monotonic seconds): delays count from then on.
        has_fired: whether the fault was injected in this process.
    """

    fault: Injection
    dice: random.Random
    began_s: float
    has_fired: bool = False
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
        """The delay in seconds after which the fault fires, where time is its only condition; else None."""
        fault = self.fault
        waits = fault.section is not None or fault.step is not None or fault.probability is not None
        if waits:
            return None
        return self._delay_s

    def on_step(self, steps: Container[int], now_s: float) -> bool:
        """Returns whether the fault fires now.

        Args:
            steps: the steps that the training has just reached.
            now_s: monotonic seconds.
        """
        if self.fault.step in steps:
            self._reached = True
        return self.fault.section is None and self._fires(now_s)

    def on_section(self, name: str, now_s: float) -> bool:
        """Returns whether the fault fires in a section that was just opened.

        Args:
            name: the section's name.
            now_s: monotonic seconds.
        """
        return name == self.fault.section and self._fires(now_s)

    def _fires(self, now_s: float) -> bool:
        """Returns whether all other conditions hold. The dice are thrown at each occasion anew, until they say yes."""
        if self.has_fired or not self._reached or now_s < self.began_s + self._delay_s:
            return False
        probability = self.fault.probability
        self.has_fired = probability is None or self.dice.random() < probability
        return self.has_fired
