"""When ranks that are zombies count as failed: tables."""

from __future__ import annotations

import pytest

from ft_launcher.agent.cycle.zombies import Zombies
from ft_launcher.decide.attribution import FaultClass, FaultKind, RankEvidence


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([("ab", "ab")], False),
        ([("ab", "ab"), ("ab", "ab")], True),
        ([("ab", "ab"), ("ab", "a"), ("ab", "ab")], False),
        ([("ab", "a"), ("ab", "b")], False),
        ([("ab", "ab"), ("b", "b")], True),
        ([("ab", "a"), ("b", "b"), ("b", "b")], True),
        ([("a", "a"), ("b", "b")], False),
        ([("", ""), ("", "")], False),
    ],
)
def test_all_of_them_twice_in_a_row(samples: list[tuple[str, str]], found: bool) -> None:
    zombies = Zombies()
    for running, dead in samples:
        zombies.sample({*map(ord, running)}, {*map(ord, dead)})
    assert zombies.are_all is found


def test_the_fault_names_the_rank_whose_code_is_held() -> None:
    evidence = [RankEvidence(4, 0, 40), RankEvidence(5, 1, 50)]
    zombies = Zombies()
    assert zombies.fault(evidence) is None
    zombies.are_all = True
    fault = zombies.fault(evidence)
    assert fault is not None
    assert (fault.kind, fault.fault_class, fault.rank) == (FaultKind.HANG, FaultClass.HANG, 4)
    assert "other threads" in fault.what and fault.others == ("rank 5 was a zombie too",)
    zombies.unreaped = {1}
    fault = zombies.fault(evidence)
    assert fault is not None and fault.rank == 5 and "held by another process" in fault.what
