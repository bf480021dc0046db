"""A machine that is disabled: by its settings, or for the time of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ft_client.rerun import RerunDataIterator, RerunErrorInjector, RerunMode, RerunStateMachine
from ft_client.rerun.unexpected_result import Device
from tests.client.rerun.test_state_machine import NAN, in_doubt, is_nan, one_step, validating


def test_a_disabled_machine_takes_data_that_cannot_be_replayed() -> None:
    machine, data = RerunStateMachine(), iter([1, 2])
    while machine.should_run_forward_backward(data):  # type: ignore[arg-type]
        next(data)
    assert machine.state_dict(data)["data_iterators"] == []
    machine.set_mode("validate_results")
    with pytest.raises(TypeError, match=r"data_iterator: .* is not a RerunDataIterator"):
        machine.should_run_forward_backward(data)  # type: ignore[arg-type]


def test_a_disabled_machine_makes_no_faults() -> None:
    machine = RerunStateMachine(error_injector=RerunErrorInjector(1))
    assert one_step(machine, [1.0]) == []
    assert machine.suspect is None


def test_an_evaluation_between_steps(tmp_path: Path) -> None:
    """As Megatron-LM does it: disabled meanwhile, so that a result that is wrong raises, and a step in doubt stays."""
    tracker = tmp_path / "rejected"
    machine = validating(node_name="b", error_injector=RerunErrorInjector(1), result_rejected_tracker_filename=tracker)
    machine.load_state_dict(in_doubt())
    mode = machine.get_mode()
    machine.set_mode(RerunMode.DISABLED)
    data = RerunDataIterator(range(100))
    for loss in (1.0, 2.0):
        next(data)
        machine.validate_result(loss, is_nan, "loss is NaN")
    machine.validate_result(NAN, is_nan, "loss is NaN", fatal=False)
    assert data.saved_microbatches == [], "nothing is kept that nobody will ask for"
    with pytest.raises(RuntimeError, match="Unexpected result nan"):
        machine.validate_result(NAN, is_nan, "loss is NaN")
    assert [json.loads(line)["status"] for line in tracker.read_text().splitlines()] == ["rerun_disabled"] * 2
    machine.set_mode(mode)
    assert machine.mode is machine.get_mode() is RerunMode.VALIDATE_RESULTS
    assert machine.suspect == Device("a", "cpu"), "of the step in doubt"
    data = RerunDataIterator([2])
    assert machine.should_run_forward_backward(data) and next(data) == 1
    with pytest.raises(RuntimeError, match=r"^mode='disabled': a step is being computed"):
        machine.set_mode("disabled")
    with pytest.raises(ValueError, match="mode='never' must be one of"):
        machine.set_mode("never")
