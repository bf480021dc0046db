"""What kinds of faults do in the process of the test: NaN under the rerun machine, and steps that get slow."""

from __future__ import annotations

import math

import pytest
import torch

from ft_client.inject import inject_fault, injected_fault
from ft_client.rerun import RerunDataIterator, RerunDiagnostic, RerunMode, RerunStateMachine
from rank_monitor.contract.settings.injection import parse


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
    monkeypatch.setattr(injected_fault, "time", clock)
    slow, seen = injected_fault.Straggle(parse(f"kind:straggle,{text}")), []
    for step in range(len(ends)):
        clock.now += 2
        slow.on_step(range(step, step + 1))
        seen.append(clock.now)
    assert seen == ends


@pytest.mark.parametrize("loss", [torch.tensor([3.0]), torch.tensor(3), 3.0, 3])
def test_nan_is_a_transient_error_of_one_check(loss: torch.Tensor | float, caplog: pytest.LogCaptureFixture) -> None:
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    data, found = RerunDataIterator(iter(range(10))), []
    inject_fault("nan")
    for _ in range(2):
        while machine.should_run_forward_backward(data):
            next(data)
            machine.validate_result(loss, math.isnan, "loss is NaN", fatal=False)
        found.append(machine.diagnostic)
    assert found[0] is RerunDiagnostic.TRANSIENT_ERROR
    assert "Unexpected result" in caplog.text and "nan" in caplog.text and "Possible transient error!" in caplog.text
    assert caplog.text.count("Unexpected result") == 1
