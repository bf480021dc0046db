"""A rank that gets slow, by a clock of the test's."""

from __future__ import annotations

import pytest

from ft_client.inject import straggle
from rank_monitor.contract.injection import parse


class Clock:
    """Stands for the module `time`: it advances by steps of the test and by sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("text", "ends"),
    [("factor:3", [6.0, 12.0, 18.0, 24.0]), ("factor:3,for:10", [6.0, 12.0, 14.0, 16.0]), ("factor:1", [2.0, 4.0])],
)
def test_steps_take_so_many_times_as_long(monkeypatch: pytest.MonkeyPatch, text: str, ends: list[float]) -> None:
    clock = Clock()
    monkeypatch.setattr(straggle, "time", clock)
    slow, seen = straggle.Straggle(parse(f"kind:straggle,{text}")), []
    for step in range(len(ends)):
        clock.now += 2
        slow.on_step(range(step, step + 1))
        seen.append(clock.now)
    assert seen == ends
