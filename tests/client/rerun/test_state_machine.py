"""The machine in one process: what it refuses, what it does when it is disabled, and what it keeps."""

from __future__ import annotations

import _thread
import json
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ft_client import rerun
from ft_client.rerun import RerunDataIterator, RerunStateMachine, RerunStateMachineConfig

NAN = float("nan")


def is_nan(value: float) -> bool:
    return math.isnan(value)


def one_step(machine: RerunStateMachine, values: list[float], **check: Any) -> list[float]:
    """A step whose runs give these values; what is left of them."""
    left = list(values)
    while machine.should_run_forward_backward(None):
        machine.validate_result(left.pop(0), is_nan, "loss is NaN", **check)
    return left


def validating(**arguments: Any) -> RerunStateMachine:
    return RerunStateMachine(mode="validate_results", **arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mode": "sometimes"}, "mode='sometimes' must be one of disabled, validate_results, report_stats"),
        ({"state_save_func": dict}, "state_save_func and state_restore_func: give both, or none"),
        ({"state_restore_func": dict}, "state_save_func and state_restore_func: give both, or none"),
        ({"state_save_func": 1, "state_restore_func": dict}, "state_save_func=1 cannot be called"),
        ({"state_save_func": dict, "state_restore_func": 1}, "state_restore_func=1 cannot be called"),
        ({"error_injector": 1}, "error_injector=1 is not a RerunErrorInjector"),
    ],
)
def test_arguments_of_the_machine(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        RerunStateMachine(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"result": "1"}, "result='1' is neither a number nor a tensor"),
        ({"result": torch.ones(2)}, "result: a tensor of shape"),
        ({"rejection_func": None}, "rejection_func=None"),
        ({"rejection_func": 3}, "rejection_func=3"),
        ({"rejection_func": lambda result: torch.ones(2)}, "rejection_func gave"),
        ({"comparison_func": 3}, "comparison_func=3"),
        ({"message": 3}, "message=3"),
        ({"tolerance": -1.0}, "tolerance=-1"),
        ({"tolerance": NAN}, "tolerance=nan"),
        ({"tolerance": "0"}, "tolerance='0'"),
    ],
)
@pytest.mark.parametrize("mode", ["disabled", "validate_results"])
def test_arguments_of_a_check(arguments: dict[str, Any], named: str, mode: str) -> None:
    machine = RerunStateMachine(mode=mode)
    assert machine.should_run_forward_backward(None)
    with pytest.raises((TypeError, ValueError), match=named):
        machine.validate_result(**{"result": 1.0, "rejection_func": is_nan, "message": "loss is NaN"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"result": None}, "result=None"),
        ({"threshold": 0}, "threshold=0"),
        ({"threshold": NAN}, "threshold=nan"),
        ({"threshold": float("inf")}, "threshold=inf"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"num_samples": 1.5}, "num_samples=1.5"),
    ],
)
def test_arguments_of_is_unexpectedly_large(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        RerunStateMachine().is_unexpectedly_large(**{"result": 1.0, "threshold": 2.0, "context": "loss"} | arguments)


def test_a_comparison_that_raises() -> None:
    def compare(first: float, second: float) -> float:
        raise KeyError("no")

    with pytest.raises(RuntimeError, match=r"comparison_func raised KeyError\('no'\)"):
        one_step(validating(), [NAN, NAN], comparison_func=compare)


def test_own_comparison_and_tolerance() -> None:
    machine = validating()
    one_step(machine, [NAN, NAN], comparison_func=lambda first, second: 0.5, tolerance=0.4)
    assert machine.diagnostic == "transient_error"
    machine = validating()
    one_step(machine, [NAN, NAN], comparison_func=lambda first, second: 0.5, tolerance=0.5)
    assert machine.should_checkpoint_and_exit() == (True, True, 16)


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="loader")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_two_threads() -> None:
    machine = validating()
    machine.should_run_forward_backward(None)
    for call in (
        lambda: machine.should_run_forward_backward(None),
        lambda: machine.validate_result(1.0, is_nan, "loss is NaN"),
    ):
        error = in_a_thread(call)
        assert isinstance(error, RuntimeError)
        assert "used in a second thread, 'loader'" in str(error)
    other = validating()
    assert in_a_thread(lambda: one_step(other, [1.0])) is None, "one thread, whichever"


def test_threads_of_torch_may_check() -> None:
    """A backward pass on a device runs in threads that Python did not start."""
    machine, raised, done = validating(), [], threading.Event()
    machine.should_run_forward_backward(None)

    def hook() -> None:
        try:
            machine.validate_result(NAN, is_nan, "gradient is NaN")
        except RuntimeError as error:
            raised.append(error)
        done.set()

    _thread.start_new_thread(hook, ())
    assert done.wait(60) and not raised
    assert machine.should_run_forward_backward(None), "the step is computed again"


def test_a_disabled_machine_computes_once_and_raises() -> None:
    machine = RerunStateMachine()
    assert one_step(machine, [1.0, 2.0]) == [2.0]
    assert machine.should_checkpoint_and_exit() == (False, False, 0)
    one_step(machine, [NAN], fatal=False)
    with pytest.raises(RuntimeError, match=r"Unexpected result nan on rank 0 at iteration #2 invocation #1 \(message="):
        one_step(machine, [NAN])
    with pytest.raises(RuntimeError, match="loss is NaN"):
        rerun.get_rerun_state_machine().validate_result(NAN, is_nan, "loss is NaN")
    rerun.destroy_rerun_state_machine()


def test_between_steps_nothing_is_checked() -> None:
    machine = validating()
    machine.validate_result(NAN, is_nan, "loss of an evaluation")
    assert one_step(machine, [1.0, 2.0]) == [2.0]
    machine.validate_result(NAN, is_nan, "loss of an evaluation")
    assert one_step(machine, [1.0, 2.0]) == [2.0]


def test_the_step_counter_may_be_set(caplog: pytest.LogCaptureFixture) -> None:
    machine = validating()
    machine.current_iteration = 149
    one_step(machine, [NAN, 1.0])
    assert machine.current_iteration == 150
    assert "Unexpected result nan on rank 0 at iteration #150 invocation #1 (message='loss is NaN')" in caplog.text


def test_a_fatal_result_counts_before_an_earlier_one_that_is_not() -> None:
    machine = validating()
    while machine.should_run_forward_backward(None):
        machine.validate_result(NAN, is_nan, "auxiliary loss is NaN", fatal=False)
        machine.validate_result(NAN, is_nan, "loss is NaN")
    assert machine.should_checkpoint_and_exit() == (True, True, 16)


def test_a_rerun_that_takes_another_way(caplog: pytest.LogCaptureFixture) -> None:
    machine, runs = validating(), 0
    while machine.should_run_forward_backward(None):
        if runs == 0:
            machine.validate_result(NAN, is_nan, "loss is NaN")
        else:
            machine.validate_result(NAN, is_nan, "norm is NaN")
        runs += 1
    assert runs == 2
    assert machine.diagnostic is None
    assert machine.should_checkpoint_and_exit() == (False, False, 0)
    assert "did not come to this check again" in caplog.text
    assert "(message='norm is NaN'), in a rerun" in caplog.text


def test_what_a_rerun_rejects_for_the_first_time_is_said(caplog: pytest.LogCaptureFixture) -> None:
    machine, runs = validating(), 0
    for also in ([NAN, NAN], [1.0, NAN]):
        left = [[NAN, also[0]], [1.0, also[1]]]
        while machine.should_run_forward_backward(None):
            loss, norm = left.pop(0)
            machine.validate_result(loss, is_nan, "loss is NaN")
            machine.validate_result(norm, is_nan, "norm is NaN")
            runs += 1
        new = [record.message for record in caplog.records if "in a rerun" in record.message]
        assert len(new) == (1 if also[0] == 1.0 else 0)
    assert runs == 4


def test_reruns_are_no_samples_of_what_is_large() -> None:
    machine, left = validating(), [NAN, 1.0]
    while machine.should_run_forward_backward(None):
        machine.is_unexpectedly_large(5.0, 2.0, "loss")
        machine.validate_result(left.pop(0), is_nan, "loss is NaN")
    assert machine.state_dict()["largest"] == {"loss": {"maximum": 5.0, "samples": 1}}


def test_statistics_compare_within_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """Another way through a rerun leaves results over, which say nothing of the next step's."""
    machine = RerunStateMachine(mode="report_stats")
    for checks in ([2, 1], *[[1, 2]] * 9):
        for count in checks:
            assert machine.should_run_forward_backward(None)
            for _ in range(count):
                machine.validate_result(NAN, is_nan, "loss is NaN")
        with caplog.at_level("INFO"):
            assert not machine.should_run_forward_backward(None)
    assert "after 10 reruns" in caplog.messages[-1] and "samples=10 avg=0" in caplog.messages[-1]


def test_who_is_under_suspicion() -> None:
    machine = validating(node_name="a")
    one_step(machine, [1.0])
    assert machine.suspect is None
    one_step(machine, [NAN, NAN])
    assert str(machine.suspect) == "node a, device cpu"


def test_a_checkpoint_between_steps() -> None:
    machine, data = validating(), RerunDataIterator(range(100))
    for _ in range(3):
        while machine.should_run_forward_backward(data):
            machine.is_unexpectedly_large(float(next(data)), 2.0, "loss")
    state = json.loads(json.dumps(machine.state_dict(data)))
    assert state["data_iterators"][0]["saved_microbatches"] == []
    again, fresh = validating(), RerunDataIterator(range(3, 100))
    random.seed(5)
    expected = random.random()
    random.seed(5)
    again.load_state_dict(state)
    assert again.should_run_forward_backward(fresh)
    assert again.current_iteration == 3 and next(fresh) == 3
    assert random.random() == expected, "random numbers are the training's own here"
    assert again.state_dict(fresh)["largest"] == {"loss": {"maximum": 2.0, "samples": 3}}


def test_a_checkpoint_in_the_middle_of_a_step() -> None:
    machine, data = validating(), RerunDataIterator(range(100))
    assert machine.should_run_forward_backward(data)
    first = [next(data), random.random()]
    again, fresh = validating(), RerunDataIterator(range(1, 100))
    again.load_state_dict(json.loads(json.dumps(machine.state_dict(data))))
    assert again.should_run_forward_backward(fresh)
    assert again.current_iteration == 0
    assert [next(fresh), random.random()] == first


def in_doubt() -> dict[str, Any]:
    machine, data = validating(node_name="a"), RerunDataIterator([1, 2])
    while machine.should_run_forward_backward(data):
        next(data)
        machine.validate_result(NAN, is_nan, "loss is NaN")
    state: dict[str, Any] = json.loads(json.dumps(machine.state_dict(data), allow_nan=False))
    return state


def test_a_checkpoint_that_was_loaded_is_saved_as_it_was() -> None:
    again = validating()
    again.load_state_dict(in_doubt())
    assert again.state_dict(RerunDataIterator([])) == in_doubt() | {"rng": again.state_dict()["rng"]}


@pytest.mark.parametrize("mode", ["disabled", "report_stats"])
def test_a_machine_that_does_not_validate_takes_the_step_as_a_new_one(mode: str) -> None:
    machine, data = RerunStateMachine(mode=mode), RerunDataIterator([3])
    machine.load_state_dict(in_doubt())
    assert machine.should_run_forward_backward(data)
    assert machine.current_iteration == 0
    assert list(data) == [1, 3]


def test_a_checkpoint_of_another_world() -> None:
    state, machine = in_doubt() | {"world_size": 2}, validating()
    assert not machine.validate_state_dict(state)
    with pytest.raises(ValueError, match="state_dict: saved by a world_size of 2, this job has 1"):
        machine.load_state_dict(state)
    assert machine.validate_state_dict(in_doubt())


def test_the_machine_of_the_process() -> None:
    rerun.destroy_rerun_state_machine()
    assert rerun.get_rerun_state_machine().mode is rerun.RerunMode.DISABLED
    made = rerun.initialize_rerun_state_machine(mode="report_stats")
    assert rerun.get_rerun_state_machine() is made
    again = rerun.initialize_rerun_state_machine(mode="validate_results")
    assert rerun.get_rerun_state_machine() is again is not made
    rerun.destroy_rerun_state_machine()
    assert rerun.get_rerun_state_machine().mode is rerun.RerunMode.DISABLED
    rerun.destroy_rerun_state_machine()


def test_the_usual_checks_of_a_loss() -> None:
    config = RerunStateMachineConfig()
    assert (config.rerun_mode, config.check_for_nan_in_loss, config.check_for_spiky_loss) == ("disabled", True, False)
    assert (config.error_injection_rate, config.error_injection_type) == (0, "transient_error")
    config = RerunStateMachineConfig("validate_results", check_for_spiky_loss=True)
    machine = config.initialize(node_name="a")
    losses = [torch.tensor(1.0)] * 100 + [torch.tensor(11.0), torch.tensor(11.0), 1.0, torch.tensor(NAN), NAN]
    steps = 0
    while losses:
        while machine.should_run_forward_backward(None):
            config.validate_loss(losses.pop(0))
        steps += 1
    assert steps == 103, "a spike and a NaN are computed twice"
    assert machine.should_checkpoint_and_exit() == (True, True, 16)
    rerun.destroy_rerun_state_machine()
    with pytest.raises(ValueError, match="error_injection_type='x'"):
        RerunStateMachineConfig(error_injection_type="x").initialize()
    with pytest.raises(ValueError, match="mode='x'"):
        RerunStateMachineConfig("x").initialize()
    for factor in (-1, math.inf, "10"):
        with pytest.raises(ValueError, match="spiky_loss_factor="):
            RerunStateMachineConfig(spiky_loss_factor=factor)
