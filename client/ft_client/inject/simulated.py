"""Simulated faults as the peers' integrations describe them: `SimulatedFaultParams`, and the text of a variable.

They strike at every start of the training, after a delay that is drawn anew each time, and are reported to the launcher
as every fault on purpose.
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
        base_delay: seconds, at least.
        rand_delay: seconds that are added at most; how many is drawn.
        rank_to_fail: the rank that fails; None: one at random, the same one for all ranks.

    Raises:
        ValueError: naming the argument.
    """

    fault_type: str
    base_delay: float
    rand_delay: float = 0.0
    rank_to_fail: int | None = None

    def __post_init__(self) -> None:
        injection.kind_of(self.fault_type)
        for name, kind in (
            ("base_delay", kinds.SECONDS),
            ("rand_delay", kinds.SECONDS),
            ("rank_to_fail", kinds.COUNT_OR_NONE),
        ):
            try:
                kind.read(getattr(self, name))
            except ValueError as problem:
                raise ValueError(f"{name}={getattr(self, name)!r} {problem}") from None

    @classmethod
    def of_text(cls, text: str) -> SimulatedFaultParams:
        """As in the variable: `type;rank;delay`, the rank may be empty. Up to a fifth of the delay is added.

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
        return cls(kind, seconds, _SPREAD * seconds, count)


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
    rank = injection.RANDOM if params.rank_to_fail is None else params.rank_to_fail
    text = f"rank:{rank},kind:{params.fault_type},cycle:any"
    fault = injection.parse(text)
    if not place.is_meant(fault):
        return []
    delay_s = params.base_delay + params.rand_delay * place.dice(fault, "delay").random()
    return [(Strike(fault, place, unless=unless), delay_s)]
