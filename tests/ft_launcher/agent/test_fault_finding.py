"""What is known of a failed cycle before its ranks are stopped."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.agent import fault_finding
from ft_launcher.decide.attribution import RankEvidence
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import RankException

LOST = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
OWN = "bad value"


@pytest.mark.parametrize(
    ("message", "suspected_s_ago", "hangs"),
    [(LOST, 0.1, True), (LOST, 60.0, False), (LOST, None, False), (OWN, 0.1, False)],
    ids=["suspect", "long ago", "never suspect", "an error of its own"],
)
def test_a_rank_that_lost_a_peer_just_before_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, message: str, suspected_s_ago: float | None, hangs: bool
) -> None:
    """The peer was on another node, and ended there because it hung: where this one was is to be told as well."""
    error = RankException("RuntimeError", message, f"RuntimeError: {message}", 0.0)
    evidence = RankEvidence(2, 0, 42, exit_code=1, died_at=1.0, exception=error, exception_at=1.0)
    monkeypatch.setattr(fault_finding, "gather", lambda *given: [evidence])
    suspected_at = None
    if suspected_s_ago is not None:
        suspected_at = time.monotonic() - suspected_s_ago
    found = SimpleNamespace(suspected_at=suspected_at)
    monitors = SimpleNamespace(report=lambda local_rank: found)
    placement = SimpleNamespace(ranks=[])
    parts = SimpleNamespace(settings=SimpleNamespace(monitor=MonitorSettings()))
    ranks: Any = SimpleNamespace(
        running=lambda: {}, monitors=monitors, placement=placement, processes=None, request=None, parts=parts
    )
    assert fault_finding.look(ranks).hangs is hangs
