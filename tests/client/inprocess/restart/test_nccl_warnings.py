"""What is said about the environment of in-process restart."""

from __future__ import annotations

import datetime

import pytest

from ft_client.inprocess.arguments import Timeouts
from ft_client.inprocess.restart.nccl_warnings import nccl_warnings

GOOD = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_PLUGIN": "none",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
NEW = (2, 27, 3)
TIMEOUTS = Timeouts()  # hard_timeout is 90 s


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def test_nothing_to_say() -> None:
    assert nccl_warnings(GOOD, NEW, "2.13.0+cu130", TIMEOUTS, seconds(600)) == []
    assert nccl_warnings(GOOD, (2, 26, 2), "2.8.0", TIMEOUTS) == []


def test_nothing_without_nccl() -> None:
    assert nccl_warnings({}, None, "2.6.0", TIMEOUTS, seconds(1)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"NCCL_NVLS_ENABLE": None}, "NCCL_NVLS_ENABLE=0"),
        ({"NCCL_NVLS_ENABLE": "2"}, "NCCL_NVLS_ENABLE=0"),
        ({"NCCL_NET_PLUGIN": None}, "NCCL_NET_PLUGIN=none"),
        ({"NCCL_NET_PLUGIN": "ofi"}, "NCCL_NET_PLUGIN=none"),
        ({"NCCL_NET_PLUGIN": "NONE"}, None),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": None}, "TORCH_NCCL_RETHROW_CUDA_ERRORS=0"),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "TRUE"}, "TORCH_NCCL_RETHROW_CUDA_ERRORS=0"),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "False"}, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": None}, "TORCH_NCCL_ASYNC_ERROR_HANDLING is 3"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING is 1"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": None, "NCCL_ASYNC_ERROR_HANDLING": "0"}, None),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, None),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "149"}, "stood still for 149 s, before hard_timeout=90 s + 60 s"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "150"}, None),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "no number"}, None),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "9" * 30}, None),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10", "TORCH_NCCL_ENABLE_MONITORING": "0"}, None),
    ],
)
def test_variables(changed: dict[str, str | None], said: str | None) -> None:
    environment = {name: value for name, value in {**GOOD, **changed}.items() if value is not None}
    warnings = nccl_warnings(environment, NEW, "2.13.0", TIMEOUTS)
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_the_heartbeat_that_torch_has_by_default() -> None:
    timeouts = Timeouts(hard_timeout=seconds(480), barrier_timeout=seconds(600))
    (warning,) = nccl_warnings(GOOD, NEW, "2.13.0", timeouts)
    assert "480 s, before hard_timeout=480 s + 60 s" in warning
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=540" in warning


def test_the_timeout_of_collectives_counts_where_it_ends_the_process() -> None:
    ending = {**GOOD, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert len(nccl_warnings(ending, NEW, "2.13.0", TIMEOUTS, seconds(150))) == 1
    warning = nccl_warnings(ending, NEW, "2.13.0", TIMEOUTS, seconds(120))[1]
    assert "120 s in a collective" in warning and "at least 150 s" in warning
    assert nccl_warnings(GOOD, NEW, "2.13.0", TIMEOUTS, seconds(120)) == []


@pytest.mark.parametrize(
    ("nccl", "torch", "said"),
    [
        ((2, 26, 1), "2.13.0", "NCCL 2.26.1"),
        ((2, 9, 9), "2.13.0", "use 2.26.2 or later"),
        (NEW, "2.7.1+cu128", "torch 2.7.1+cu128"),
        (NEW, "2.10.0a0+git123", None),
    ],
)
def test_versions(nccl: tuple[int, ...], torch: str, said: str | None) -> None:
    warnings = nccl_warnings(GOOD, nccl, torch, TIMEOUTS)
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_each_is_one_line() -> None:
    warnings = nccl_warnings({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"}, (2, 20, 0), "2.6.0", TIMEOUTS, seconds(1))
    assert len(warnings) == 8
    assert not any("\n" in warning or warning.endswith(".") for warning in warnings)
