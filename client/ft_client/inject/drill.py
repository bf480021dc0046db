"""The faults that the launcher was asked for, set up in a rank before its script runs. What fails here is said, and
the training goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from ft_client.inject import simulated, steps
from ft_client.inject.place import here
from ft_client.inject.strike import Strike
from ft_client.inject.when import When
from rank_monitor.contract import env, injection


def begin() -> Callable[[], None]:
    """Sets up what the environment asks for; the variable goes, so that children of the rank are spared.

    Returns:
        What starts the clocks: from then on a fault may strike at any place.
    """
    timed = simulated.of_environment()
    text = os.environ.pop(env.INJECT, "")
    place = here()
    try:
        mine = [fault for fault in injection.parse_all(text) if place.is_meant(fault)]
    except ValueError as problem:
        mine = []
        print(f"ft_client: {env.INJECT} does nothing: {problem}", file=sys.stderr)
    now_s = time.monotonic()
    for fault in mine:
        when = When(fault, place.dice(fault, f"when {place.rank}"), now_s)
        strike = Strike(fault, place)
        if when.by_time_s is None:
            steps.listen(_Waiting(when, strike))
        else:
            timed.append((strike, when.by_time_s))

    def start() -> None:
        for strike, delay_s in timed:
            strike.later(delay_s)

    return start


class _Waiting:
    """A fault that waits for the training to come to its place."""

    def __init__(self, when: When, strike: Strike) -> None:
        self._when, self._strike = when, strike

    def on_step(self, steps: range) -> None:
        if self._when.on_step(steps, time.monotonic()):
            self._strike.now(f"at step {steps[-1]}")

    def on_section(self, name: str) -> None:
        if self._when.on_section(name, time.monotonic()):
            self._strike.now(f"in section {name}")
