"""Complaints: each kind is said once, then counted."""

from __future__ import annotations

from rank_monitor.contract.wire.complaints import Complaints


def test_each_kind_is_said_once_then_counted() -> None:
    said: list[str] = []
    complaints = Complaints(said.append)
    for number in range(129_585):
        complaints.about("bytes", f"garbage {number}")
    complaints.about("other", "another kind")
    assert said == ["garbage 0 (said once)", "garbage 999 (1000 of this kind so far)", "another kind (said once)"]
