"""Faults on purpose of this rank: those that a script asks for by a call, and those that its environment asks for.

`inject_fault` and `simulate_fault` are the calls. `bootstrap.py` calls `set_up` before the script runs: it sets up the
faults of `--ft-inject`, and those of the variable that NVIDIA's Lightning callback reads. A text in the environment
that cannot be read is reported on stderr, and the training goes on without its faults.

A requested fault goes this way: `this_rank.py` says whether it is meant for this rank; `trigger.py` says when it is
due, from the steps and sections that `steps.py` reports; `injected_fault.py` makes it happen. A fault that depends on
nothing but time needs no trigger: a hidden thread waits for it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ft_client.inject import steps
from ft_client.inject.injected_fault import InjectedFault
from ft_client.inject.this_rank import this_rank
from ft_client.inject.trigger import Trigger
from rank_monitor.contract import env
from rank_monitor.contract.settings import injection, kinds

_SPREAD = 0.2
"""How much is added to a delay in the peers' variable: this part of it at most."""
_READS_IT_ITSELF = "megatron.training.ft_integration"
"""Megatron-LM's own integration reads the peers' variable too. Where its module is loaded, the fault is left to it."""


def inject_fault(
    kind: str, delay_s: float = 0, rank: int | None = None, callback: Callable[[], object] | None = None
) -> None:
    """Makes a fault happen: at once in the calling thread, or after a delay, wherever the training is then.

    With a delay it does not wait. Examples: `inject_fault("sigkill")`, `inject_fault("kind:exit,code:3", delay_s=10)`.

    Args:
        kind: a kind as in `--ft-inject`, or one with parts: `"kind:exit,code:3"`.
        delay_s: seconds; 0: now.
        rank: the global rank that fails; on all other ranks nothing happens. None: the calling rank.
        callback: called on that rank right before it happens.

    Raises:
        ValueError: there is no such kind; a part makes no sense here; or, with a delay, a kind that happens to the main
            thread was asked for in another thread.
        FaultOnPurpose, BaseFaultOnPurpose, MemoryError, RuntimeError: the fault itself, of some kinds.
    """
    own = this_rank()
    if ":" not in kind:
        kind = f"kind:{kind}"
    if rank is None:
        rank = own.rank
    fault = injection.parse(kind)
    if delay_s < 0:
        raise ValueError(f"delay_s={delay_s!r} must not be negative")
    fault = dataclasses.replace(fault, rank=rank, cycle=injection.ANY)
    if not own.is_meant(fault):
        return
    injected = InjectedFault(fault, own, callback)
    if delay_s:
        injected.inject_later(delay_s)
    else:
        injected.inject()


@dataclass(frozen=True)
class SimulatedFaultParams:
    """A fault some time after the start, as NVIDIA's and Megatron-LM's integrations describe it.

    The fault happens at every start of the training, after a delay that is drawn anew each time.

    Args:
        fault_type: `rank_killed`, `rank_hung`, `random` (one of the two), or any other kind of fault.
        base_delay: the shortest delay, in seconds.
        rand_delay: how many seconds are added at most; a number is drawn.
        rank_to_fail: the rank that fails; None: a rank that is drawn, the same on all ranks.

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
        """Reads `type;rank;delay`, the form of the peers' variable. The rank may be empty.

        Up to a fifth of the delay is added.

        Raises:
            ValueError: naming what is wrong.
        """
        fields = [field.strip() for field in text.split(";")]
        if len(fields) != 3:
            raise ValueError(f"{text!r} is not TYPE;RANK;DELAY")
        kind, rank, delay = fields
        try:
            count = kinds.COUNT_OR_NONE.read(rank)
            seconds = kinds.SECONDS.read(delay)
        except ValueError as problem:
            raise ValueError(f"{text!r}: {problem}") from None
        assert isinstance(seconds, float) and (count is None or isinstance(count, int))
        return cls(kind, seconds, _SPREAD * seconds, count)


def simulate_fault(params: SimulatedFaultParams) -> None:
    """Schedules the fault, where it is meant for this rank. Does not wait.

    Called once on each rank, at the start, in the main thread.

    Raises:
        ValueError: the fault happens to the main thread, and another thread calls.
    """
    for injected, delay_s in planned(params):
        injected.inject_later(delay_s)


def planned(params: SimulatedFaultParams, unless: str = "") -> list[tuple[InjectedFault, float]]:
    """Returns the fault and its delay in seconds; nothing where the fault is meant for another rank.

    Args:
        unless: the fault does nothing where a module of this name is loaded.
    """
    own = this_rank()
    rank = injection.RANDOM if params.rank_to_fail is None else str(params.rank_to_fail)
    fault = injection.parse(f"rank:{rank},kind:{params.fault_type},cycle:any")
    if not own.is_meant(fault):
        return []
    delay_s = params.base_delay + params.rand_delay * own.dice(fault, "delay").random()
    return [(InjectedFault(fault, own, unless=unless), delay_s)]


def set_up() -> Callable[[], None]:
    """Sets up the faults of the environment. Called by `bootstrap.py`, before the script is loaded.

    Removes our variable from the environment: a child of the rank must not have the same fault once more.

    Returns:
        A function that starts the clocks of the faults that depend on time alone. From its call on such a fault may
        happen at any place, so it is called right before the script runs.
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
        injected = InjectedFault(fault, own)
        if trigger.by_time_s is None:
            _inject_when_reached(trigger, injected)
        else:
            timed.append((injected, trigger.by_time_s))

    def start() -> None:
        for injected, delay_s in timed:
            injected.inject_later(delay_s)

    return start


def _inject_when_reached(trigger: Trigger, injected: InjectedFault) -> None:
    """Injects the fault at a step or in a section of the training."""

    def on_step(reached: range) -> None:
        if trigger.on_step(reached, time.monotonic()):
            injected.inject(f"at step {reached[-1]}")

    def on_section(name: str) -> None:
        if trigger.on_section(name, time.monotonic()):
            injected.inject(f"in section {name}")

    steps.listen(on_step, on_section)


def _simulated(environ: Mapping[str, str]) -> list[tuple[InjectedFault, float]]:
    """Returns the fault of the peers' variable and its delay in seconds, where it is set and meant for this rank."""
    text = environ.get(env.SIMULATED_FAULT, "")
    if not text.strip():
        return []
    try:
        return planned(SimulatedFaultParams.of_text(text), unless=_READS_IT_ITSELF)
    except ValueError as problem:
        print(f"ft_client: {env.SIMULATED_FAULT} does nothing: {problem}", file=sys.stderr)
        return []
