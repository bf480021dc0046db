"""Which of the faults that nodes bring ended a cycle. Pure; knows no job and no restart policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Fault = Mapping[str, Any]
"""A node's fault as JSON; empty: it had none."""


def culprit(faults: Mapping[str, Fault], gone: bool) -> str | None:
    """The node whose fault is the cause: the first that failed by itself; with a node gone, the others had to.

    Where all ranks exit for the sake of a result in doubt, it is the node of that one.

    Args:
        faults: by node, those who told of theirs first coming first.
        gone: whether a node was lost or left.
    """
    own = [node for node, fault in faults.items() if _own(fault)]
    own = [node for node in own if faults[node].get("doubt")] or own
    any_fault = [node for node, fault in faults.items() if fault]
    return next(iter(own or ([] if gone else any_fault)), None)


def as_one(cause: Fault, all_faults: Collection[Fault]) -> dict[str, Any]:
    """The cause, with an exit code that all first failures agree on only if they do."""
    code = cause.get("agreed_exit_code")
    agree = all(fault.get("agreed_exit_code") == code for fault in all_faults if _own(fault))
    return {**cause, "agreed_exit_code": code if agree else None}


def _own(fault: Fault) -> bool:
    """Whether there is a fault, and it is no consequence of another node's."""
    return bool(fault) and not fault.get("collateral")
