"""What is kept of a profile. The CUDA part runs in tests/gpu."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.autograd import DeviceType, profiler
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ft_client.straggler.kernels import MAX_KERNELS, Kernels
from ft_client.straggler.samples import Statistic


def event(name: str, took_us: float, device: object = DeviceType.CUDA, annotation: bool = False) -> FunctionEvent:
    return FunctionEvent(
        id=0,
        name=name,
        thread=0,
        start_us=5,
        end_us=5 + took_us,
        device_type=device,
        is_user_annotation=annotation,
    )


def test_kernels_are_taken_in_by_name_in_microseconds() -> None:
    kernels = Kernels()
    kernels.record([event("gemm", 10), event("gemm", 30), event("relu", 2)])
    found = kernels.drain()
    assert (found["gemm"][Statistic.MED], found["gemm"][Statistic.NUM]) == (20, 2)
    assert found["relu"][Statistic.AVG] == 2
    assert kernels.drain() == {}


@pytest.mark.parametrize(
    "other",
    [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 9),
        event("Memcpy HtoD (Pageable -> Device)", 9),
        event("Memset (Device)", 9),
        event("cudaLaunchKernel", 9, DeviceType.CPU),
        event("a user's range", 9, annotation=True),
    ],
    ids=lambda one: one.name.split()[0],
)
def test_what_is_no_kernel_or_waits_for_others_does_not_count(other: FunctionEvent) -> None:
    kernels = Kernels()
    kernels.record([other])
    assert kernels.drain() == {}


def test_the_number_of_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Kernels()
    with caplog.at_level(logging.WARNING):
        kernels.record(event(f"kernel {index}", 1) for index in range(MAX_KERNELS + 5))
        kernels.record([event("kernel 0", 3)])
    found = kernels.drain()
    assert len(found) == MAX_KERNELS
    assert found["kernel 0"][Statistic.NUM] == 2
    assert [record.message for record in caplog.records] == [
        "more than 512 kinds of kernels: kernel 512 and further ones are not counted"
    ]


def test_events_of_a_real_profile_can_be_read() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        torch.ones(8) @ torch.ones(8)
    events = recording.events()
    assert len(events) > 0
    kernels = Kernels()
    kernels.record(events)
    assert kernels.drain() == {}


def test_torch_tells_whether_a_profile_runs() -> None:
    """The underscored name that this relies on."""
    assert profiler._is_profiler_enabled is False
    with profile(activities=[ProfilerActivity.CPU]):
        assert profiler._is_profiler_enabled is True
    assert profiler._is_profiler_enabled is False


def test_without_cuda_nothing_is_recorded() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    kernels = Kernels()
    assert not kernels.start()
    kernels.stop(keep=False)
