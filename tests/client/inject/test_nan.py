"""The fault `nan` under the rerun machine: one check finds NaN, and the rerun that it was transient."""

from __future__ import annotations

import math

import pytest
import torch

from ft_client.inject import inject_fault
from ft_client.rerun import RerunDataIterator, RerunDiagnostic, RerunMode, RerunStateMachine


@pytest.mark.parametrize("loss", [torch.tensor([3.0]), torch.tensor(3), 3.0, 3])
def test_one_check_finds_nan(loss: torch.Tensor | float, caplog: pytest.LogCaptureFixture) -> None:
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
