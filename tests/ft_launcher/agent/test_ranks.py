"""What a node does before its ranks start, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.agent.ranks import Ranks
from rank_monitor.contract.flush_order import FlushResult


@pytest.mark.parametrize(("cycle", "were_started", "looks"), [(0, False, 1), (0, True, 0), (40, False, 0)])
def test_a_flushed_state_is_brought_back_before_the_first_cycle_only(
    cycle: int, were_started: bool, looks: int
) -> None:
    """A spare that takes a lost node's place in a later cycle holds up nobody for it."""
    found: list[FlushResult] = []

    def bring_back(*arguments: Any) -> FlushResult:
        return FlushResult()

    ranks: Any = SimpleNamespace(
        cycle=cycle,
        were_started=were_started,
        placement=SimpleNamespace(world_size=2),
        global_ranks=lambda: [0, 1],
        parts=SimpleNamespace(
            state_in_memory=SimpleNamespace(flush=SimpleNamespace(bring_back=bring_back)),
            signals=SimpleNamespace(fileno=lambda: 0),
            recorder=SimpleNamespace(memory=SimpleNamespace(brought_back=found.append)),
        ),
    )
    Ranks.bring_state_back(ranks)
    assert len(found) == looks
