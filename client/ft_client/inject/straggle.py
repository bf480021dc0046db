"""A rank that gets slow: after each step of the training it sleeps as long as makes the step take `factor` times as
long."""

from __future__ import annotations

import time

from rank_monitor.contract.injection import Injection


class Straggle:
    """Slows the steps from now on, for as long as the fault says."""

    def __init__(self, fault: Injection) -> None:
        self._fault = fault
        self._since = time.monotonic()
        self._until = None if fault.for_s is None else self._since + fault.for_s

    def on_step(self, steps: range) -> None:
        """A step is over."""
        now = time.monotonic()
        if self._until is None or now < self._until:
            time.sleep((self._fault.factor - 1) * (now - self._since))
        self._since = time.monotonic()

    def on_section(self, name: str) -> None:
        """Does not matter here."""
