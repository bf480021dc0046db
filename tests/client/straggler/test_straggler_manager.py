"""The peer's form around a training: alone here, on four ranks in test_ranks.py."""

from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ft_client.straggler import Detector, NVRxStragglerDetectionManager, StragglerManager, StragglerOptions
from tests.patience import patient

NAP_S = patient(0.03)
"""On a busy machine a sleep ends late, by up to 40 ms; that must be a small part of it."""


def train(training: StragglerManager, steps: int = 12, **how: Any) -> list[bool]:
    step = training.wrap_train_step_function(lambda pause_s=0.004: time.sleep(pause_s))
    told = []
    for _ in range(steps):
        step(**how)
        told.append(training.check_stragglers(0))
    return told


def test_what_is_said_of_a_calm_training(caplog: pytest.LogCaptureFixture) -> None:
    training = StragglerManager(report_time_interval=0.01)
    training.initialize()
    with caplog.at_level(logging.INFO, "ft_client.straggler"):
        assert not any(train(training))
    lines = [record.message for record in caplog.records if record.name == "ft_client.straggler"]
    assert lines[:3] == ["Section relative performance:", " Worst performing 1/1 ranks:", lines[2]]
    assert lines[2].startswith("  Rank=0 Node=") and lines[2].endswith(" Score=1.00")
    assert any(line.startswith("Straggler report processing time: 0.") and line.endswith(" sec.") for line in lines)
    structured = next(record for record in caplog.records if hasattr(record, "straggler_report"))
    assert json.loads(structured.message)["scores"][0]["kind"] == "relative"
    training.shutdown()
    training.shutdown()


def test_the_peers_name_has_the_peers_logger() -> None:
    assert NVRxStragglerDetectionManager().logger.name == "megatron.bridge.NVRxStragglerDetection"
    assert NVRxStragglerDetectionManager(StragglerOptions(logger_name="mine")).logger.name == "mine"
    assert NVRxStragglerDetectionManager(logger_name="mine").logger.name == "mine"


def test_defaults() -> None:
    options = StragglerOptions()
    assert options.report_time_interval == 300
    assert options.num_gpu_perf_scores_to_print == 5
    assert (options.gpu_relative_perf_threshold, options.gpu_individual_perf_threshold) == (0.7, 0.7)
    assert (options.calc_relative_gpu_perf, options.calc_individual_gpu_perf) == (True, True)
    assert (options.stop_if_detected, options.enable_logging, options.profiling_interval) == (False, True, 1)


def test_bridges_configuration_is_taken_at_its_word() -> None:
    """There `enabled` is False by default; `StragglerOptions`, which somebody made for this, are enabled."""

    def step() -> None: ...

    training = NVRxStragglerDetectionManager(SimpleNamespace(enabled=False))
    training.initialize()
    assert training.wrap_train_step_function(step) is step
    assert training.check_stragglers(0) is False and not Detector.initialized
    assert StragglerOptions().enabled


@pytest.mark.parametrize("arguments", [{"save": 3}, {"exit_code": "9"}, {"exit_code": 256}, {"exit_code": True}])
def test_an_ending_that_cannot_be(arguments: dict[str, Any]) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        StragglerManager(**arguments)


def test_a_rank_that_slows_down_stops_it() -> None:
    training = StragglerManager(report_time_interval=5 * NAP_S, stop_if_detected=True, calc_relative_gpu_perf=False)
    training.initialize()
    assert not any(train(training, pause_s=NAP_S))
    assert any(train(training, pause_s=4 * NAP_S))


def test_with_a_save_it_leaves_by_itself_with_code_0() -> None:
    saved: list[bool] = []
    training = StragglerManager(
        report_time_interval=5 * NAP_S,
        stop_if_detected=True,
        calc_relative_gpu_perf=False,
        save=lambda: saved.append(Detector.initialized),
    )
    training.initialize()
    assert not any(train(training, pause_s=NAP_S))
    with pytest.raises(SystemExit) as left:
        train(training, pause_s=4 * NAP_S)
    assert (left.value.code, saved, Detector.initialized) == (0, [True], False)


def test_disabled_it_does_nothing() -> None:
    training = StragglerManager(enabled=False)
    training.initialize()

    def step() -> None:
        pass

    assert training.wrap_train_step_function(step) is step
    assert not Detector.initialized
    assert not training.check_stragglers(0)


def test_twice_initialized_is_an_error_and_after_shutdown_it_is_none() -> None:
    training = StragglerManager()
    training.initialize()
    with pytest.raises(RuntimeError, match="initialized already"):
        training.initialize()
    training.shutdown()
    assert train(training, 3) == [False] * 3
    training.initialize()
    assert Detector.initialized


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="no_option"):
        StragglerManager(no_option=1)
    with pytest.raises(ValueError, match=r"^gpu_relative_perf_threshold=2"):
        StragglerManager(StragglerOptions(), gpu_relative_perf_threshold=2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"report_time_interval": 0}, "report_time_interval"),
        ({"profiling_interval": 0}, "profiling_interval"),
        ({"profiling_interval": 1.5}, "profiling_interval"),
        ({"gpu_relative_perf_threshold": 0}, "gpu_relative_perf_threshold"),
        ({"gpu_individual_perf_threshold": 1.5}, "gpu_individual_perf_threshold"),
        ({"num_gpu_perf_scores_to_print": -1}, "num_gpu_perf_scores_to_print"),
        ({"calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False}, "calc_relative_gpu_perf"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        StragglerOptions(**options)  # type: ignore[arg-type]
