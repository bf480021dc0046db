"""An unexpected result: which, of which call of a check, where it was computed; and its form in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ft_client.rerun import result
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.place import Place


@dataclass(frozen=True)
class Call:
    """One call of `validate_result` in a step: the place in the program, and how many came to it so far, from 1."""

    place: str
    invocation: int


@dataclass(frozen=True)
class Failure:
    """An unexpected result. `injected`: made up, to be found to be this."""

    call: Call
    rank: int
    iteration: int
    message: str
    result: result.Result
    fatal: bool
    computed_at: Place
    injected: RerunDiagnostic | None = None

    def __str__(self) -> str:
        where = f"on rank {self.rank} at iteration #{self.iteration} invocation #{self.call.invocation}"
        return f"Unexpected result {self.result!r} {where} (message='{self.message}')"

    def to_json(self) -> dict[str, Any]:
        """Numbers and text."""
        form = {"result": result.to_json(self.result), "injected": self.injected and self.injected.value}
        return asdict(self) | form

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> Failure:
        """What `to_json` wrote."""
        parts = {
            "call": Call(**form["call"]),
            "result": result.from_json(form["result"]),
            "computed_at": Place(**form["computed_at"]),
            "injected": RerunDiagnostic(form["injected"]) if form["injected"] else None,
        }
        return cls(**(form | parts))
