"""The faults that the environment asks for, set up in a rank before its script runs.

They come from `--ft-inject`, and from the variable of the peers' integrations. A text that cannot be read is reported
on stderr, and the training goes on without its faults.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from ft_client.inject import steps
from ft_client.inject.fault_calls import SimulatedFaultParams, planned
from ft_client.inject.strikes import Strike
from ft_client.inject.this_rank import this_rank
from ft_client.inject.trigger import Trigger
from rank_monitor.contract import env
from rank_monitor.contract.settings import injection

_READS_IT_ITSELF = "megatron.training.ft_integration"


def begin() -> Callable[[], None]:
    """Sets up the faults of the environment, and removes our variable from it, for the sake of the rank's children.

    Returns:
        What starts the clocks: from then on a fault may strike at any place.
    """
    timed = _simulated(os.environ)
    text = os.environ.pop(env.INJECT, "")
    own = this_rank()
    try:
        faults = [fault for fault in injection.parse_all(text) if own.is_meant(fault)]
    except ValueError as problem:
        faults = []
        print(f"ft_client: {env.INJECT} does nothing: {problem}", file=sys.stderr)
    now_s = time.monotonic()
    for fault in faults:
        trigger = Trigger(fault, own.dice(fault, f"when {own.rank}"), now_s)
        strike = Strike(fault, own)
        if trigger.by_time_s is None:
            steps.listen(_Waiting(trigger, strike))
        else:
            timed.append((strike, trigger.by_time_s))

    def start() -> None:
        for strike, delay_s in timed:
            strike.later(delay_s)

    return start


class _Waiting:
    """A fault that strikes at a step or in a section of the training."""

    def __init__(self, trigger: Trigger, strike: Strike) -> None:
        self._trigger = trigger
        self._strike = strike

    def on_step(self, steps: range) -> None:
        if self._trigger.on_step(steps, time.monotonic()):
            self._strike.now(f"at step {steps[-1]}")

    def on_section(self, name: str) -> None:
        if self._trigger.on_section(name, time.monotonic()):
            self._strike.now(f"in section {name}")


def _simulated(environ: Mapping[str, str]) -> list[tuple[Strike, float]]:
    """Returns the fault of the peers' variable and its delay in seconds, where it is set and meant for this rank.

    Megatron-LM's own integration reads that variable too: where it is loaded, the fault is left to it.
    """
    text = environ.get(env.SIMULATED_FAULT, "")
    if not text.strip():
        return []
    try:
        return planned(SimulatedFaultParams.of_text(text), unless=_READS_IT_ITSELF)
    except ValueError as problem:
        print(f"ft_client: {env.SIMULATED_FAULT} does nothing: {problem}", file=sys.stderr)
        return []
