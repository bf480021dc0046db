"""What the ranks of these tests do. Each function runs on every rank, in a gloo group, and returns plain values."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_client.straggler import Detector, NVRxStragglerDetectionManager, Report, StragglerManager, section_timers
from ft_client.straggler.detector import INDIVIDUAL, RELATIVE, Detection
from tests.client import asked
from tests.client.straggler import ranks
from tests.patience import patient

NAP_S = patient(0.04)
"""On a busy machine a sleep ends up to 40 ms late, which must be a small part of it."""
SLOW = 4.0


def nap(factor: float = 1.0) -> None:
    """Work whose time no other process on this machine takes away."""
    time.sleep(NAP_S * factor)


class Pretended:
    """Time of sections that passes by `work` alone: nothing else on this machine makes a rank slow."""

    def __init__(self) -> None:
        self.now_ns = 0
        vars(section_timers)["perf_counter_ns"] = lambda: self.now_ns  # each rank is a process of its own

    def work(self, factor: float = 1.0) -> None:
        self.now_ns += int(factor * 10**7)


def compute(factor: float = 1.0) -> None:
    """Work of the CPU, times the factor: longer than the slices in which a busy machine gives processors away."""
    matrix = torch.ones(96, 96)
    for _ in range(int(300 * factor)):
        matrix = matrix @ matrix / 96.0


def one_is_slow(rank: int, pretended: bool, entries: int = 10) -> dict[str, Any] | None:
    """Rank 2 does its work slower than the others, which do the rest of theirs outside of the section: were they idle
    then, rank 2 would have the processors for itself, and be as fast as they were beside each other."""
    Detector.initialize(node_name=f"node{rank // 2}")
    if pretended:
        do, slow = Pretended().work, SLOW
    else:
        do, slow = compute, 2 * SLOW
    for _ in range(entries):
        with Detector.detection_section("work"):
            do(slow if rank == 2 else 1.0)
        if rank != 2:
            do(slow - 1.0)
    return seen(Detector.generate_report())


def one_slows_down(rank: int) -> list[dict[str, Any] | None]:
    """Three reports; from the second on rank 1 works slower than it did."""
    Detector.initialize(scores_to_compute="individual_perf_scores", node_name="n")
    told, do = [], Pretended().work
    for turn in range(3):
        for _ in range(8):
            with Detector.detection_section("work"):
                do(SLOW if rank == 1 and turn else 1.0)
        told.append(seen(Detector.generate_report()))
    return told


def calm(rank: int, runs: int, pretended: bool) -> list[dict[str, Any] | None]:
    """Runs in which nothing is slow, two sections each."""
    told, do = [], Pretended().work if pretended else nap
    for _ in range(runs):
        Detector.initialize(node_name="n")
        for _ in range(10):
            with Detector.detection_section("load"):
                do()
            with Detector.detection_section("work"):
                do(1.5)
        told.append(seen(Detector.generate_report()))
        Detector.shutdown()
    return told


def seen(report: Report | None) -> dict[str, Any] | None:
    """The scores and the stragglers of a report, as plain values."""
    if report is None:
        return None
    kinds = report.identify_stragglers()
    slow = {
        kind: {name: sorted((one.rank, one.node) for one in ids) for name, ids in kinds[kind].items()}
        for kind in ("straggler_sections_relative", "straggler_sections_individual")
    }
    return {
        "relative": {name: dict(scores) for name, scores in report.section_relative_perf_scores.items()},
        "individual": {name: dict(scores) for name, scores in report.section_individual_perf_scores.items()},
        "gpus": [dict(report.gpu_relative_perf_scores), dict(report.gpu_individual_perf_scores)],
        "nodes": dict(report.rank_to_node),
        "slow": slow,
        "slow_gpus": [*kinds["straggler_gpus_relative"], *kinds["straggler_gpus_individual"]],
    }


def agreements(rank: int) -> list[dict[str, int]]:
    """What each of several reports costs: the first, one as before, one with a section new on one rank, the next."""
    Detector.initialize()
    counts = []
    for turn in range(4):
        with Detector.detection_section("work"):
            pass
        if turn == 2 and rank == 3:
            with Detector.detection_section("late"):
                pass
        with asked.counted() as agreed:
            report = Detector.generate_report()
        assert (report is not None) == (rank == 0)
        if report is not None and turn == 2:
            assert report.section_relative_perf_scores["late"] == {3: 1.0}
        if report is not None and turn == 3:
            assert "late" not in report.section_relative_perf_scores
        counts.append(dict(collections.Counter(kind for kind, _ in agreed)))
    return counts


def silent_modes(rank: int) -> dict[str, Any]:
    """Reports that are not gathered: individual scores alone, and relative ones."""
    found: dict[str, Any] = {}
    for scores in ("individual_perf_scores", "relative_perf_scores"):
        Detector.initialize(
            scores_to_compute=[scores], gather_on_rank0=False, node_name=f"n{rank}", report_time_interval=0.01
        )
        with asked.counted() as agreed:
            report = None
            while report is None:
                with Detector.detection_section("work"):
                    nap(0.1)
                report = Detector.generate_report_if_interval_elapsed()
        told = seen(report)
        assert told is not None
        found[scores] = (
            {kind for kind, _ in agreed},
            told["nodes"],
            [list(told[kind]) for kind in ("relative", "individual")],
        )
    return found


def kernels_of_some(rank: int) -> list[dict[int, float] | None]:
    """Kernels recorded by hand: one of all ranks, one that rank 3 lacks; then a rank without any."""
    told: list[dict[int, float] | None] = []
    detection = Detection([RELATIVE, INDIVIDUAL], True, profiling_interval=1, interval_s=60.0, node=f"n{rank}")
    for turn in range(2):
        detection.kernels.record(recorded("everywhere", 10.0 * (2 if rank == 1 else 1)))
        if rank != 3:
            detection.kernels.record(recorded("somewhere", 10.0 * (rank + 1)))
        if turn and rank == 3:
            detection.kernels.drain()
        report = detection.report()
        told.append(None if report is None else dict(report.gpu_relative_perf_scores))
    return told


def recorded(name: str, took_us: float) -> list[Any]:
    """Events with what is read of those of torch's profiler."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent

    return [
        FunctionEvent(id=index, name=name, thread=0, start_us=0, end_us=took_us, device_type=DeviceType.CUDA)
        for index in range(5)
    ]


def uneven_steps(rank: int) -> list[int]:
    """The steps at which reports are made, while the ranks' own step times differ."""
    Detector.initialize(report_time_interval=0.1)
    at = []
    for step in range(80):
        time.sleep(0.001 * (1 + rank))
        report = Detector.generate_report_if_interval_elapsed()
        assert report is None or rank == 0
        if Detector.is_interval_elapsed():
            at.append(step)
    return at


def stops(rank: int, folder: Path, exit_code: int | None, steps: int = 400) -> int:
    """A training with a straggler, under the manager: returns the step at which it was told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", filename=folder / f"log.{rank}")
    save = None if exit_code is None else (folder / f"saved.{rank}").touch
    training = NVRxStragglerDetectionManager(
        StragglerManagerConfig(), report_time_interval=0.3, stop_if_detected=True, save=save, exit_code=exit_code
    )
    training.initialize()

    @training.wrap_train_step_function
    def step() -> None:
        with Detector.detection_section("forward"):
            nap(SLOW if rank == 2 else 1.0)
        dist.barrier()

    for index in range(steps):
        step()
        if training.check_stragglers(rank):
            training.shutdown()
            return index
    return -1


class StragglerManagerConfig:
    """Options as a peer's class has them: attributes, not all of ours."""

    enabled = True
    num_gpu_perf_scores_to_print = 1


def goes_on(rank: int) -> int:
    """The same without `stop_if_detected`; then shut down and initialised again."""
    reports = 0
    training = StragglerManager(report_time_interval=0.1)
    for _ in range(2):
        training.initialize()
        for _ in range(20):
            with Detector.detection_section("forward"):
                nap(SLOW / 4 if rank == 2 else 0.25)
            assert not training.check_stragglers()
            reports += Detector.is_interval_elapsed()
        training.shutdown()
    return reports


def begins_again(rank: int, folder: Path) -> list[Any]:
    """As after a restart in process: an exception leaves a section, the group is made anew, no shutdown was called.

    The detector is initialised before there is a group again.
    """
    told = []
    for turn in range(3):
        Detector.initialize(node_name=f"turn{turn} of {rank}")
        if turn:
            ranks.make_group(rank, 4, folder / f"again{turn}")
        with contextlib.suppress(ValueError):
            for entry in range(5):
                with Detector.detection_section(f"work{turn}"):
                    nap(0.1)
                    if entry == 4 and rank == turn:
                        raise ValueError("a fault")
        told.append(seen(Detector.generate_report()))
        Detector.detection_section("left open").__enter__()
        dist.destroy_process_group()
    ranks.make_group(rank, 4, folder / "again")
    Detector.initialize()
    Detector.shutdown()
    Detector.shutdown()
    return told
