"""Which limits end the restarts of a call: given to the wrapper, set for the job, or by default."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from ft_client.inprocess.abort import AbortTorchDistributed
from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.health_check import CudaHealthCheck, FaultCounter
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.nested_restarter import NestedRestarterHandlingCompleted
from ft_client.inprocess.restart.escalating import limits_of
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.rounds.escalation import EscalationLimits, LimitsSet
from rank_monitor.contract.settings import config
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import write_record

NOTHING_SET = {env.IN_PROCESS_LIMITS: write_record(LimitsSet())}
ALONE: dict[str, str] = {}
DEFAULTS = RestartSettings().in_process_limits
NO_SAME_ERROR = EscalationLimits(0, DEFAULTS.no_progress, DEFAULTS.soft_timeouts, DEFAULTS.least_progress)
NONE = EscalationLimits(0, 0, 0, DEFAULTS.least_progress)
RETRY = {"initialize": Compose(RetryController(max_iterations=4), NestedRestarterHandlingCompleted())}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (env.IN_PROCESS_LIMITS, *map(env.of_setting, config.OF_IN_PROCESS.values())):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "nvidia_resiliency_ext", raising=False)


def limits(given: dict[str, Any]) -> EscalationLimits:
    """The limits of a wrapper with these arguments."""
    return limits_of(Arguments(store_factory=object, abort=AbortTorchDistributed(), **given))


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        (NOTHING_SET, {}, DEFAULTS),
        (ALONE, {}, NO_SAME_ERROR),
        # Something of the user's ends the restarts.
        (NOTHING_SET, RETRY, NONE),
        (ALONE, RETRY, NONE),
        (NOTHING_SET, {"initialize": RetryController(min_world_size=2)}, DEFAULTS),
        (NOTHING_SET, {"health_check": Compose(CudaHealthCheck(), FaultCounter(3))}, NO_SAME_ERROR),
        (NOTHING_SET, {"health_check": FaultCounter()}, DEFAULTS),
        # What is set counts everywhere, and what the wrapper is given more.
        ({env.IN_PROCESS_LIMITS: write_record(LimitsSet(5, 6, 7, 8))}, RETRY, EscalationLimits(5, 6, 7, 8)),
        ({"FT_SAME_ERROR_LIMIT": "2", "FT_SOFT_TIMEOUT_LIMIT": "0"}, {}, EscalationLimits(2, 10, 0, 1)),
        ({"FT_MAX_NO_PROGRESS_RESTARTS": "4", "FT_MIN_PROGRESS_ITERATIONS": "9"}, RETRY, EscalationLimits(0, 4, 0, 9)),
        ({"FT_SAME_ERROR_LIMIT": "2", **NOTHING_SET}, {}, DEFAULTS),
        ({"FT_SAME_ERROR_LIMIT": "2"}, {"same_error_limit": 8}, EscalationLimits(8, 10, 3, 1)),
        (ALONE, {"same_error_limit": 3, **RETRY}, EscalationLimits(3, 0, 0, 1)),
    ],
)
def test_limits(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], given: dict[str, Any], expected: EscalationLimits
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert limits(given) == expected


def test_a_program_that_knows_us_by_the_peers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.IN_PROCESS_LIMITS, NOTHING_SET[env.IN_PROCESS_LIMITS])
    peer = ModuleType("nvidia_resiliency_ext")
    monkeypatch.setitem(sys.modules, peer.__name__, peer)
    assert limits({}) == DEFAULTS, "the peer's own package"
    peer.__ft_alias__ = True  # type: ignore[attr-defined]
    assert limits({}) == NO_SAME_ERROR
    monkeypatch.setenv(env.IN_PROCESS_LIMITS, write_record(LimitsSet(same_error=2)))
    assert limits({}).same_error == 2


def test_a_variable_without_a_possible_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SOFT_TIMEOUT_LIMIT", "often")
    with pytest.raises(ConfigError, match="FT_SOFT_TIMEOUT_LIMIT"):
        limits({})
