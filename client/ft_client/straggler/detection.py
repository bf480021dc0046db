"""One detection, from `initialize` to `shutdown`: sections, kernels, best medians so far, how a report is made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from ft_client import group
from ft_client.straggler import scores
from ft_client.straggler.callables import Wrapped
from ft_client.straggler.exchange import Exchange, References
from ft_client.straggler.interval import IntervalTracker
from ft_client.straggler.kernels import MAX_KERNELS, Kernels
from ft_client.straggler.report import Report, Scores, row_of, tables_of
from ft_client.straggler.samples import Summary
from ft_client.straggler.sections import Sections
from ft_client.straggler.told import tell

Summaries = Mapping[str, Summary]


@dataclass(frozen=True)
class Plan:
    """What was asked for; `interval_s` is the seconds between two reports."""

    relative: bool
    individual: bool
    gather_on_rank0: bool
    profiling_interval: int
    interval_s: float
    node: str

    @property
    def talks(self) -> bool:
        """Whether a report needs other ranks."""
        return self.relative or self.gather_on_rank0


class Detection:
    """The state of this process; `plan` is the same on all ranks, but for the node."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kernels = Kernels()
        self.sections = Sections(plan.profiling_interval, self.kernels)
        self.wrapped = Wrapped()
        self.tracker = IntervalTracker(plan.interval_s)
        self._exchange: Exchange | None = None  # made at the first report: the group may come after the detection
        self._best = References({}, {})

    def close(self) -> None:
        """Ends all that reaches outside of it."""
        self.wrapped.restore()
        self.kernels.stop(keep=False)

    def step(self) -> bool:
        """Counts a step; returns whether a report is due. Collective now and then, where a report is."""
        if self.tracker.step(time.monotonic()):
            own_s = self.tracker.median_s
            self.tracker.agree(group.max_over_ranks([own_s])[0] if self.plan.talks else own_s)
        return self.tracker.elapsed

    def report(self) -> Report | None:
        """The report on everything since the last one; None where rank 0 has it. Collective."""
        start_s = time.perf_counter()
        exchange = self._exchange = self._exchange or Exchange(self.plan.node)
        sections, kernels = self.sections.taken(), self.kernels.taken()
        relative = individual = None
        if self.plan.talks:
            lowest = exchange.references(scores.medians(kernels), scores.medians(sections))
            relative = _scores(lowest, sections, kernels) if self.plan.relative else None
        if self.plan.individual:
            of_kernels = islice(scores.best(self._best.kernels, kernels).items(), MAX_KERNELS)
            self._best = References(dict(of_kernels), scores.best(self._best.sections, sections))
            individual = _scores(self._best, sections, kernels)
        tell(sections, relative, individual)
        agreed, gathers = exchange.names, self.plan.gather_on_rank0
        names = list(agreed.sections if gathers else sections)
        row = row_of(relative, names) + row_of(individual, names)
        gathered = group.gather_on_rank0(row) if gathers else [row]
        if gathered is None:
            return None
        rows = dict(enumerate(gathered, 0 if gathers else exchange.rank))
        of_relative = tables_of(rows, names, 0) if relative else ({}, {})
        of_individual = tables_of(rows, names, len(names) + 1) if individual else ({}, {})
        return Report(
            *of_relative,
            *of_individual,
            rank_to_node={rank: agreed.nodes.get(rank, self.plan.node) for rank in rows},
            local_section_summaries=sections,
            local_kernel_summaries=kernels,
            generate_report_elapsed_time=time.perf_counter() - start_s,
            gather_on_rank0=gathers,
            rank=exchange.rank,
        )


def _scores(references: References, sections: Summaries, kernels: Summaries) -> Scores:
    gpu = scores.gpu_score(references.kernels, kernels)
    return Scores(gpu, scores.section_scores(references.sections, sections))
