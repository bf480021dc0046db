"""An unexpected result: which one, of which call of a check, on which device, and its form in a checkpoint.

`validation.py` makes it, `checkpoint.py` writes and reads it. What follows from it is decided in `judgement.py`.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.result import Result, from_json, to_json


@dataclass(frozen=True)
class Device:
    """A device of a node. Both names stay the same when a job is started again."""

    node: str
    device: str

    def is_same(self, other: Device) -> bool:
        """Returns whether both are the same device: a GPU by its UUID, whatever the name of its node is now."""
        return self.device == other.device and ("-" in self.device or self.node == other.node)

    def __str__(self) -> str:
        return f"node {self.node}, device {self.device}"


def current_device(node_name: str | None = None) -> Device:
    """Returns the device of this process. A GPU is named by its UUID: its index depends on which GPUs are visible.

    Args:
        node_name: None: the host's name.
    """
    device = "cpu"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        device = f"cuda:{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"
    return Device(node_name or socket.gethostname(), device)


@dataclass(frozen=True)
class ValidationCall:
    """One call of `validate_result` in a step: the place in the program, and how many came to it so far, from 1."""

    place: str
    invocation: int


@dataclass(frozen=True)
class UnexpectedResult:
    """A result that a check rejected. `injected` is what reruns shall find of one that was rejected on purpose."""

    call: ValidationCall
    rank: int
    iteration: int
    message: str
    result: Result
    fatal: bool
    computed_at: Device
    injected: RerunDiagnostic | None = None

    def __str__(self) -> str:
        where = f"on rank {self.rank} at iteration #{self.iteration} invocation #{self.call.invocation}"
        return f"Unexpected result {self.result!r} {where} (message='{self.message}')"

    def to_json(self) -> dict[str, Any]:
        """Returns the form in a checkpoint, of numbers and text."""
        form = {"result": to_json(self.result), "injected": self.injected and self.injected.value}
        return asdict(self) | form

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> UnexpectedResult:
        """Returns what `to_json` wrote."""
        parts = {
            "call": ValidationCall(**form["call"]),
            "result": from_json(form["result"]),
            "computed_at": Device(**form["computed_at"]),
            "injected": RerunDiagnostic(form["injected"]) if form["injected"] else None,
        }
        return cls(**(form | parts))
