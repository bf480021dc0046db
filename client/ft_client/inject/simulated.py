"""Simulated faults as the peers' integrations describe them: `SimulatedFaultParams`, and the text of a variable.

They strike at every start of the training, after a delay that is drawn anew each time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ft_client.inject.place import here
from ft_client.inject.strike import Strike
from rank_monitor.contract import env, injection, kinds

_DOES_IT_ITSELF = "megatron.training.ft_integration"
_SPREAD = 0.2


@dataclass(frozen=True)
class SimulatedFaultParams:
    """A fault some time after the start.

    Args:
        fault_type: `rank_killed`, `rank_hung`, `random` (one of the two), or any other kind of fault.
        base_delay: seconds; the delay is this times 1 to 1.2.
        rank: the rank that fails; None: one at random, the same one for all ranks.

    Raises:
        ValueError: naming the argument.
    """

    fault_type: str
    base_delay: float
    rank: int | None = None

    def __post_init__(self) -> None:
        injection.kind_of(self.fault_type)
        try:
            kinds.SECONDS.read(self.base_delay)
            kinds.COUNT_OR_NONE.read(self.rank)
        except ValueError as problem:
            raise ValueError(f"base_delay={self.base_delay!r}, rank={self.rank!r}: {problem}") from None

    @classmethod
    def of_text(cls, text: str) -> SimulatedFaultParams:
        """As in the variable: `type;rank;delay`, the rank may be empty.

        Raises:
            ValueError: naming what is wrong.
        """
        words = [word.strip() for word in text.split(";")]
        if len(words) != 3:
            raise ValueError(f"{text!r} is not TYPE;RANK;DELAY")
        kind, rank, delay = words
        try:
            count, seconds = kinds.COUNT_OR_NONE.read(rank), kinds.SECONDS.read(delay)
        except ValueError as problem:
            raise ValueError(f"{text!r}: {problem}") from None
        assert isinstance(seconds, float) and (count is None or isinstance(count, int))
        return cls(kind, seconds, count)


def simulate_fault(params: SimulatedFaultParams) -> None:
    """Has the fault happen. Called once on each rank, at the start of the training, in the main thread."""
    for strike, delay_s in _planned(params):
        strike.later(delay_s)


def of_environment(environ: Mapping[str, str] = os.environ) -> list[tuple[Strike, float]]:
    """The fault of the peers' variable, where it is set and meant for this rank, and after how many seconds.

    Megatron-LM's own integration reads that variable, too: where it is loaded, the fault is left to it.
    """
    text = environ.get(env.SIMULATED_FAULT, "")
    if not text.strip():
        return []
    try:
        return _planned(SimulatedFaultParams.of_text(text), unless=_DOES_IT_ITSELF)
    except ValueError as problem:
        print(f"ft_client: {env.SIMULATED_FAULT} does nothing: {problem}", file=sys.stderr)
        return []


def _planned(params: SimulatedFaultParams, unless: str = "") -> list[tuple[Strike, float]]:
    place = here()
    text = f"rank:{injection.RANDOM if params.rank is None else params.rank},kind:{params.fault_type},cycle:any"
    fault = injection.parse(text)
    if not place.is_meant(fault):
        return []
    spread = place.dice(fault, "delay").random()
    return [(Strike(fault, place, unless=unless), params.base_delay * (1 + _SPREAD * spread))]
