"""Which checks get an injected error, and what their reruns say."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ft_client.rerun import RerunDiagnostic, RerunErrorInjector
from ft_client.rerun.injector import reproduces


def test_rates() -> None:
    assert not any(RerunErrorInjector().should_inject() for _ in range(100))
    assert all(RerunErrorInjector(1).should_inject() for _ in range(100))
    tenth = RerunErrorInjector(10)
    assert 500 < sum(tenth.should_inject() for _ in range(10_000)) < 1500


def test_the_trainings_random_numbers_stay() -> None:
    random.seed(0)
    expected = random.random()
    random.seed(0)
    RerunErrorInjector(5).should_inject()
    assert random.random() == expected


@pytest.mark.parametrize(
    ("kind", "in_place", "other_hardware"),
    [("transient_error", False, False), ("persistent_error", True, False), ("correct_result", True, True)],
)
def test_reruns(kind: str, in_place: bool, other_hardware: bool) -> None:
    injected = RerunErrorInjector(1, kind).error_injection_type
    assert reproduces(injected, on_another_device=False) == in_place
    assert reproduces(injected, on_another_device=True) == other_hardware


@pytest.mark.parametrize("rate", [-1, 0.5, True, "1", None])
def test_bad_rates(rate: Any) -> None:
    with pytest.raises(ValueError, match="error_injection_rate="):
        RerunErrorInjector(rate)


def test_bad_type() -> None:
    with pytest.raises(
        ValueError, match=r"error_injection_type='wrong' must be one of correct_result, transient_error"
    ):
        RerunErrorInjector(1, "wrong")
    assert RerunErrorInjector(1, RerunDiagnostic.CORRECT_RESULT).error_injection_type == "correct_result"
