"""A training that looks for stragglers, written against the documented API of `nvidia_resiliency_ext`'s straggler.

Rank 1 loads its data slowly. Both ways of the API are used, sections and wrapped callables, and both ways to a report.
Rank 0 prints whom it found.
"""

from __future__ import annotations

import time

import torch
from nvidia_resiliency_ext.attribution import straggler
from nvidia_resiliency_ext.straggler import Detector as older

STEPS, REPORT_EVERY = 12, 6


class Loader:
    """Makes batches."""

    def __init__(self, rank: int) -> None:
        self.takes_s = 0.05 if rank == 1 else 0.002

    def get_next_batch(self) -> torch.Tensor:
        time.sleep(self.takes_s)
        return torch.ones(4, 8)


class Model(torch.nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(batch)
        return out


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    assert older is straggler.Detector
    straggler.Detector.initialize(
        scores_to_compute=["relative_perf_scores", "individual_perf_scores"],
        gather_on_rank0=True,
        profiling_interval=1,
        report_time_interval=0.2,
    )
    straggler.Detector.wrap_callables(
        callable_ids=[straggler.CallableId(Model, "forward", ignored_args=("self",))],
    )
    loader, model = Loader(rank), torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        with straggler.Detector.detection_section("data_loading", profile_cuda=False):
            batch = loader.get_next_batch()
        model(batch).sum().backward()
        optimizer.step()
        if step % REPORT_EVERY == 0:
            say(straggler.Detector.generate_report(), rank)
    straggler.Detector.restore_original_callables()
    reports = 0
    while not reports:
        with straggler.Detector.detection_section("data_loading", profile_cuda=False):
            loader.get_next_batch()
        found = straggler.Detector.generate_report_if_interval_elapsed()
        reports += straggler.Detector.is_interval_elapsed()
        assert (found is not None) == (rank == 0 and reports == 1)
    straggler.Detector.shutdown()
    if rank == 0:
        print("a report by the interval", flush=True)
    del model, optimizer  # else the model owns the group last, and torch may wait for ever for the group's thread
    torch.distributed.destroy_process_group()


def say(report: straggler.Report | None, rank: int) -> None:
    assert (report is None) == (rank != 0)
    if report is None:
        return
    found = report.identify_stragglers(section_rel_threshold=0.5)
    slow = {name: sorted(one.rank for one in who) for name, who in found["straggler_sections_relative"].items()}
    (local,) = (report.local_section_summaries[name] for name in ("data_loading",))
    print(f"slow: {slow}; {local[straggler.Statistic.NUM]:.0f} loads; nodes {sorted(report.rank_to_node)}", flush=True)


if __name__ == "__main__":
    main()
