"""Reports of in-process wrappers, for tests that care for a few of their fields."""

from __future__ import annotations

from typing import Any

from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.wire.messages import RestartReport


def report(
    phase: str, soft_s: float = 60.0, hard_s: float = 90.0, grace_s: float = 5.0, **others: Any
) -> RestartReport:
    """A report of rank 0 in round 0 of a call in the store of the launcher, where `others` does not say more."""
    fields: dict[str, Any] = {
        "round": 0,
        "began_ns": 0,
        "is_timed": True,
        "entry_rank": 0,
        "call_prefix": "in_process/0",
        "limit_s": 30.0,
    }
    limits = {"soft_timeout_s": soft_s, "hard_timeout_s": hard_s, "grace_s": grace_s}
    return RestartReport(RestartPhase(phase), **(fields | limits | others))
