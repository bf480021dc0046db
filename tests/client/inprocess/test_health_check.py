"""Checks of a rank's health."""

from __future__ import annotations

import datetime

import pytest
import torch

from ft_client.inprocess import exception
from ft_client.inprocess.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded
from ft_client.inprocess.state import FrozenState, State

FINE = State(1, 4).freeze()
FAULT = ValueError("the fault")
FAULTY = State(1, 4, fn_exception=FAULT).freeze()


@pytest.mark.parametrize(
    ("limit", "states", "exceeded_at"),
    [
        (None, [FAULTY] * 50, None),
        (0, [FINE, FINE], None),
        (0, [FINE, FAULTY], 1),
        (2, [FAULTY, FINE, FAULTY, FINE], None),
        (2, [FAULTY, FINE, FAULTY, FINE, FAULTY], 4),
    ],
)
def test_only_own_faults_count(limit: int | None, states: list[FrozenState], exceeded_at: int | None) -> None:
    counter = FaultCounter(limit)
    for step, state in enumerate(states):
        if step == exceeded_at:
            with pytest.raises(FaultCounterExceeded, match=f"above max_rank_faults={limit}") as raised:
                counter(state)
            assert raised.value.__cause__ is FAULT
        else:
            assert counter(state) is state


def test_no_cuda_no_check() -> None:
    assert CudaHealthCheck().timeout == datetime.timedelta(seconds=30)
    assert torch.cuda.is_initialized() or CudaHealthCheck(datetime.timedelta(0))(FINE) is FINE


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_a_healthy_device() -> None:
    torch.ones(8, device="cuda").sum()
    assert CudaHealthCheck()(FINE) is FINE


@pytest.mark.gpu
@needs_gpu
def test_a_device_that_does_not_come_to_an_end() -> None:
    torch.cuda.init()
    torch.cuda._sleep(20_000_000_000)
    with pytest.raises(exception.TimeoutError, match="CUDA synchronisation"):
        CudaHealthCheck(datetime.timedelta(milliseconds=50))(FINE)
    torch.cuda.synchronize()
