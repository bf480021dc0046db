"""Kernels of timed sections on a GPU, through torch's profiler."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ft_client.straggler import Detector, Report, Statistic

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000


@pytest.fixture(autouse=True)
def detection() -> Iterator[None]:
    Detector.initialize(node_name="n")
    yield
    Detector.shutdown()


def spin(cycles: int, entries: int = 5, profile_cuda: bool = True) -> Report:
    """A report on entries with two kernels, one of which takes so many cycles."""
    ones = torch.ones(1024, device="cuda")
    for _ in range(entries):
        with Detector.detection_section("work", profile_cuda=profile_cuda):
            torch.cuda._sleep(cycles)
            ones.relu()
    report = Detector.generate_report()
    assert report is not None
    return report


def test_kernels_are_timed_in_microseconds() -> None:
    report = spin(CYCLES)
    kernels = report.local_kernel_summaries
    print({name[:40]: of[Statistic.MED] for name, of in kernels.items()}, report.generate_report_elapsed_time)
    assert len(kernels) >= 2
    assert {5.0} <= {of[Statistic.NUM] for of in kernels.values()}
    (spun,) = (of for name, of in kernels.items() if "spin" in name)
    assert 100 < spun[Statistic.MED] < 100_000
    assert report.gpu_relative_perf_scores == {0: 1.0}
    assert "work" in report.local_section_summaries


def test_a_gpu_that_slows_down_is_told_by_its_own_past() -> None:
    assert not any(spin(CYCLES).identify_stragglers().values())
    report = spin(4 * CYCLES)
    assert report.gpu_individual_perf_scores[0] == pytest.approx(0.25, abs=0.15)
    assert {one.rank for one in report.identify_stragglers()["straggler_gpus_individual"]} == {0}


def test_sections_that_do_not_profile_cuda() -> None:
    report = spin(CYCLES, profile_cuda=False)
    assert report.local_kernel_summaries == {}
    assert math.isnan(report.gpu_relative_perf_scores[0])


def test_sections_inside_sections_count_each_kernel_once() -> None:
    with Detector.detection_section("outer"):
        with Detector.detection_section("inner"):
            torch.cuda._sleep(CYCLES)
        torch.cuda._sleep(CYCLES)
    report = Detector.generate_report()
    assert report is not None
    assert sum(of[Statistic.NUM] for name, of in report.local_kernel_summaries.items() if "spin" in name) == 2


def test_a_profile_of_the_user_is_left_alone() -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as own:
        report = spin(CYCLES)
    assert "work" in report.local_section_summaries
    assert report.local_kernel_summaries == {}
    assert sum("spin" in event.name for event in own.events()) >= 5
    assert spin(CYCLES).local_kernel_summaries
