"""When restarts in process end, since another would not help: what ended the iterations in, a reason out. Pure.

What is remembered stands in the ranks' store, so that every rank can go on with it; the last one that comes to the
start of an iteration decides for all. What follows is fresh ranks, or the end of a call that has no launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.foreign import parse_json
from rank_monitor.contract.json_record import from_json
from rank_monitor.contract.messages import NO_ITERATION

_T = TypeVar("_T")
SOFT_TIMEOUT, JOINING, COLLATERAL = "SOFT_TIMEOUT", "JOINING", "collateral"
_NO_ERRORS = frozenset({SOFT_TIMEOUT, "HARD_TIMEOUT", "UNRESPONSIVE"})
"""Interruptions that no error of the program brought about; a hang is counted apart."""
_RIGHT_AFTER = 2.0
"""So many times the limit: without progress before it, a hang is found after one of it."""


@dataclass(frozen=True)
class Limits:
    """How often each may happen in a row; 0: any number of times.

    `same_error`: the same error on the same rank. `no_progress`: restarts without progress. `soft_timeouts`: hangs
    right after a restart. `least_progress`: iterations of the training that count as progress.
    """

    same_error: int = 0
    no_progress: int = 0
    soft_timeouts: int = 0
    least_progress: int = 1

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Limits:
        """What `to_json` wrote.

        Raises:
            ProtocolError: it is no such text.
        """
        return _read(cls, text)


@dataclass(frozen=True)
class Life:
    """What one rank saw of an iteration.

    Attributes:
        ran_s: how long the function ran there.
        pinged: it called `ping()`.
        reached: the training's iteration that was reported last, NO_ITERATION: none ever was.
        soft_s: the soft timeout.
    """

    ran_s: float
    pinged: bool
    reached: int
    soft_s: float


@dataclass(frozen=True)
class Restarts:
    """What is remembered of a call.

    Attributes:
        counted: the last iteration that is in it.
        fault: rank and error of the last one; empty: it had none.
        same: how many times in a row it was that one.
        without_progress: iterations in a row without progress.
        soft_timeouts: hangs in a row, each right after a restart.
        mark: how far the training came, by its own report.
        tells: the training has shown progress before, by a report or a ping: its lack means something.
    """

    counted: int = -1
    fault: str = ""
    same: int = 0
    without_progress: int = 0
    soft_timeouts: int = 0
    mark: int = NO_ITERATION
    tells: bool = False

    @classmethod
    def read(cls, text: str | bytes) -> Restarts:
        """What `to_json` wrote; of anything else, as if there had been no restart yet."""
        try:
            return _read(cls, text)
        except ProtocolError:
            return cls()

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    def after(self, iteration: int, records: Sequence[str], life: Life | None, limits: Limits) -> Restarts:
        """With an iteration in it that was interrupted.

        Args:
            iteration: its number; one that is in it already changes nothing.
            records: why it was, as ranks and those who speak for them wrote it.
            life: how it went on one rank; None: the function did not run there.
            limits: for what counts as progress.
        """
        if iteration <= self.counted:
            return self
        fault = _fault_of(records)
        kind = fault.get("interruption", "")
        if kind == JOINING:
            return replace(self, counted=iteration)
        name = _name(fault)
        right_after = iteration > 0 and life is not None and life.ran_s <= _RIGHT_AFTER * life.soft_s
        return replace(
            self if life is None else self._progressed(life, max(1, limits.least_progress)),
            counted=iteration,
            fault=name,
            same=(self.same + 1 if name == self.fault else 1) if name else 0,
            soft_timeouts=self.soft_timeouts + 1 if kind == SOFT_TIMEOUT and right_after else 0,
        )

    def _progressed(self, life: Life, least: int) -> Restarts:
        if life.reached != NO_ITERATION:
            if self.mark == NO_ITERATION or life.reached >= self.mark + least:
                return replace(self, mark=life.reached, without_progress=0, tells=True)
        elif life.pinged:
            return replace(self, without_progress=0, tells=True)
        return replace(self, without_progress=self.without_progress + 1) if self.tells else self

    def why_end(self, limits: Limits) -> str:
        """Why there is no further restart; empty: there is one."""
        if 0 < limits.same_error <= self.same:
            return f"the same fault {self.same} times in a row: {self.fault}"
        if 0 < limits.soft_timeouts <= self.soft_timeouts:
            return f"{self.soft_timeouts} hangs in a row right after a restart"
        if 0 < limits.no_progress <= self.without_progress:
            return f"{self.without_progress} restarts in a row without progress"
        return ""


def _fault_of(records: Sequence[str]) -> Mapping[str, Any]:
    """The first record that is no consequence of another; empty where there is none."""
    for record in records:
        try:
            found = parse_json(record)
        except ValueError:
            continue
        if isinstance(found, dict) and not found.get(COLLATERAL):
            return found
    return {}


def _name(fault: Mapping[str, Any]) -> str:
    """Rank and error, such that the same fault has the same; empty: an error of the program it is none."""
    kind = fault.get("interruption")
    if not isinstance(kind, str) or kind in _NO_ERRORS:
        return ""
    error = fault.get("error")
    return f"{error if isinstance(error, str) else kind} on rank {fault.get('member', fault.get('rank'))}"


def _read(kind: type[_T], text: str | bytes) -> _T:
    try:
        return from_json(kind, parse_json(text))
    except ValueError as problem:
        raise ProtocolError(f"{kind.__name__}: {problem}") from None
