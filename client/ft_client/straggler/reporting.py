"""The scores of a rank, the report on all ranks, and the forms in which both are sent, printed and recorded. Pure.

    section score = median of the reference / own median
    GPU score     = mean over kernels of (median of the reference / own median), weighted by NUM x AVG of the own kernel

The reference of a relative score is the smallest median among the ranks, that of an individual score the rank's own
best median so far. A score is in (0, 1]; 0.5 is half as fast. It is NaN only for a GPU without a kernel to compare.

`detector.py` computes this rank's scores and makes the `Report`; `straggler_manager.py` prints the findings. People
search logs for the wording of what is printed, which is that of NVIDIA's callbacks. Where no rank has kernels to
compare (no CUDA) a rank's score in a finding is the lowest of its sections, and the texts say so. The section around
the whole step counts only when there is no other section: in it, all ranks wait for the slowest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_client.straggler.samples import Statistic, Summary
from rank_monitor.contract.wire.messages import SectionTimes

THRESHOLD = 0.75
"""A rank with a score below is slow, unless another threshold is given. NVIDIA's default."""
_SMALLEST = 1e-9
"""Below what any clock here can measure: a median of zero counts as this."""
_MAX_SECTIONS = 64
"""Sections in the message to the launcher, whose size is bounded. Those that took longest are kept."""
_MAX_NAME = 100
"""Characters of a section's name in that message: the last ones, which have the line's number."""
STEP_SECTION = "train_step"
"""The section that `StragglerManager` opens around the whole step."""
_KINDS = ("relative", "individual")
_WARNINGS = {
    ("GPU", "relative"): "Some GPUs have worse relative performance.",
    ("GPU", "individual"): "Some GPUs performance dropped.",
    ("Section", "relative"): "Some ranks have worse relative performance.",
    ("Section", "individual"): "Some ranks performance dropped.",
}


@dataclass(frozen=True)
class References:
    """The medians that scores compare with, by name of the kernel or section."""

    kernels: Mapping[str, float]
    sections: Mapping[str, float]


@dataclass(frozen=True)
class Scores:
    """Relative or individual scores of one rank.

    Attributes:
        gpu: the score of its kernels; NaN without kernels to compare.
        sections: section -> score.
    """

    gpu: float
    sections: Mapping[str, float]


def scores_of(references: References, sections: Mapping[str, Summary], kernels: Mapping[str, Summary]) -> Scores:
    """Returns the scores of this rank's sections and kernels, against references of either kind."""
    return Scores(gpu_score(references.kernels, kernels), section_scores(references.sections, sections))


def medians(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Returns the median of each summary, in its unit."""
    return {name: summary[Statistic.MED] for name, summary in summaries.items()}


def score(reference: float, median: float) -> float:
    """Returns the score of one median against its reference, in (0, 1]."""
    return min(1.0, max(reference, _SMALLEST) / max(median, _SMALLEST))


def section_scores(references: Mapping[str, float], summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Returns the score of each section that has a reference."""
    own = medians(summaries)
    return {name: score(references[name], median) for name, median in own.items() if name in references}


def gpu_score(references: Mapping[str, float], summaries: Mapping[str, Summary]) -> float:
    """Returns the score of all kernels that have a reference; NaN when none has. The formula is in the module's text.

    The weight of a kernel is the time that it took in all, so that a slow kernel that hardly ever runs counts little.
    """
    total = 0.0
    weighted = 0.0
    for name, summary in summaries.items():
        if name in references:
            weight = max(summary[Statistic.NUM] * summary[Statistic.AVG], _SMALLEST)
            weighted += weight * score(references[name], summary[Statistic.MED])
            total += weight
    if total:
        return min(1.0, weighted / total)
    return math.nan


def best_medians(previous: Mapping[str, float], summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Returns the smallest median so far of everything ever seen: the reference of individual scores."""
    own = medians(summaries)
    return {**previous, **{name: min(median, previous.get(name, median)) for name, median in own.items()}}


@dataclass(frozen=True)
class StragglerId:
    """A rank that is slow, and the node it runs on."""

    rank: int
    node: str


@dataclass(frozen=True)
class Report:
    """The scores of all ranks on rank 0, or of this rank where nothing was gathered. Each score is in (0, 1].

    The names are NVIDIA's.

    Attributes:
        gpu_relative_perf_scores, gpu_individual_perf_scores: rank -> score, NaN without kernels; empty where these
            scores were not to be computed.
        section_relative_perf_scores, section_individual_perf_scores: section -> rank -> score; empty likewise.
        rank_to_node: rank -> the name of its node.
        local_section_summaries: section -> summary of this rank's own times, in ms.
        local_kernel_summaries: kernel -> summary of this rank's own times, in us.
        generate_report_elapsed_time: how long the report took, in seconds.
        gather_on_rank0: whether the scores of all ranks were gathered.
        rank: this rank.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Summary] = field(default_factory=dict)
    local_kernel_summaries: Mapping[str, Summary] = field(default_factory=dict)
    generate_report_elapsed_time: float = 0.0
    gather_on_rank0: bool = True
    rank: int = 0

    @property
    def has_kernels(self) -> bool:
        """Whether any rank has a GPU score that is a number."""
        scores = (*self.gpu_relative_perf_scores.values(), *self.gpu_individual_perf_scores.values())
        return not all(map(math.isnan, scores))

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = THRESHOLD,
        section_rel_threshold: float = THRESHOLD,
        gpu_indiv_threshold: float = THRESHOLD,
        section_indiv_threshold: float = THRESHOLD,
    ) -> dict[str, Any]:
        """Returns the ranks whose score is below a threshold. NaN is below none.

        Args:
            gpu_rel_threshold, gpu_indiv_threshold: for the scores of kernels.
            section_rel_threshold, section_indiv_threshold: for the scores of sections.

        Returns:
            `straggler_gpus_relative` and `straggler_gpus_individual`, sets of `StragglerId`;
            `straggler_sections_relative` and `straggler_sections_individual`, such a set by section, no empty ones.

        Raises:
            ValueError: a threshold is outside (0, 1].
        """
        check_threshold("gpu_rel_threshold", gpu_rel_threshold)
        check_threshold("section_rel_threshold", section_rel_threshold)
        check_threshold("gpu_indiv_threshold", gpu_indiv_threshold)
        check_threshold("section_indiv_threshold", section_indiv_threshold)
        return {
            "straggler_gpus_relative": self._below(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": self._below(self.gpu_individual_perf_scores, gpu_indiv_threshold),
            "straggler_sections_relative": self._sections_below(
                self.section_relative_perf_scores, section_rel_threshold
            ),
            "straggler_sections_individual": self._sections_below(
                self.section_individual_perf_scores, section_indiv_threshold
            ),
        }

    def _sections_below(
        self, scores: Mapping[str, Mapping[int, float]], threshold: float
    ) -> dict[str, set[StragglerId]]:
        found = {name: self._below(of_ranks, threshold) for name, of_ranks in scores.items()}
        return {name: slow for name, slow in found.items() if slow}

    def _below(self, scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
        return {StragglerId(rank, self.rank_to_node[rank]) for rank, score in scores.items() if score < threshold}


def check_threshold(name: str, value: object) -> None:
    """Checks that a threshold is a number in (0, 1].

    Raises:
        ValueError: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r}: a threshold must be a number above 0 and at most 1")


def row_of(scores: Mapping[str, Scores], names: Collection[str]) -> list[float]:
    """Returns the row of numbers that a rank sends to rank 0: for each kind of scores the GPU's, then the sections'.

    Args:
        scores: kind -> scores; the same kinds in the same order on all ranks.
        names: the sections, in the order that all ranks have agreed on. NaN stands for a score that does not exist.
    """
    row = []
    for of_kind in scores.values():
        row += [of_kind.gpu, *(of_kind.sections.get(name, math.nan) for name in names)]
    return row


def tables_of(
    rows: Mapping[int, list[float]], kinds: Iterable[str], names: Collection[str]
) -> dict[str, tuple[dict[int, float], dict[str, dict[int, float]]]]:
    """Returns for each kind of scores the GPU scores and the section scores of all ranks.

    Args:
        rows: rank -> what `row_of` returned there.
        kinds: the kinds of scores, in the order in which they are in a row.
        names: the sections, in the order in which they are in a row.
    """
    tables = {}
    for position, kind in enumerate(kinds):
        begin = position * (1 + len(names))
        sections: dict[str, dict[int, float]] = {}
        for index, name in enumerate(names, begin + 1):
            found = {rank: row[index] for rank, row in rows.items() if not math.isnan(row[index])}
            if found:
                sections[name] = found
        tables[kind] = {rank: row[begin] for rank, row in rows.items()}, sections
    return tables


def section_times(sections: Mapping[str, Summary], scores: Mapping[str, Scores]) -> SectionTimes:
    """Returns the message to the monitor: times and scores of the sections that took longest, and the GPU's scores.

    The message is bounded in size, whatever the sections are. The launcher writes it into its journal.
    """
    of_gpu: dict[str, float | None] = dict.fromkeys(_KINDS)
    of_gpu |= {kind: of_kind.gpu for kind, of_kind in scores.items() if not math.isnan(of_kind.gpu)}
    longest = sorted(sections, key=lambda name: -sections[name][Statistic.NUM] * sections[name][Statistic.AVG])
    return SectionTimes(
        {
            name[-_MAX_NAME:]: {
                "med_ms": sections[name][Statistic.MED],
                "num": int(sections[name][Statistic.NUM]),
                **{kind: scores[kind].sections.get(name) if kind in scores else None for kind in _KINDS},
            }
            for name in longest[:_MAX_SECTIONS]
        },
        of_gpu,
    )


@dataclass(frozen=True)
class RankScores:
    """What a report says of all ranks by one kind of scores: what is printed and recorded.

    Attributes:
        subject: "GPU" or "Section": what the scores are of.
        kind: "relative" or "individual".
        scores: rank -> score, the worst first, none of them NaN.
        threshold: a rank with a lower score is a straggler.
        nodes: rank -> the name of its node.
    """

    subject: str
    kind: str
    scores: Mapping[int, float]
    threshold: float
    nodes: Mapping[int, str]

    @property
    def flagged(self) -> list[int]:
        """The ranks below the threshold."""
        return [rank for rank, score in self.scores.items() if score < self.threshold]

    def lines(self, shown: int) -> list[str]:
        """Returns the lines that name the worst and the best ranks, at most `shown` of each; none without a score."""
        ranks, count = list(self.scores), min(shown, len(self.scores))
        if not count:
            return []
        return [
            f"{self.subject} {self.kind} performance:",
            f" Worst performing {count}/{len(ranks)} ranks:",
            *map(self._line, ranks[:count]),
            f" Best performing {count}/{len(ranks)} ranks:",
            *map(self._line, ranks[::-1][:count]),
        ]

    def warning(self) -> str | None:
        """Returns the warning that names the stragglers; None where there is none."""
        if not self.flagged:
            return None
        return f"STRAGGLER DETECTION WARNING: {_WARNINGS[self.subject, self.kind]} Affected ranks: {self.flagged}"

    def spread(self) -> dict[str, float]:
        """Returns the lowest, median and highest score as `min`, `med` and `max`; nothing where there is no score."""
        values = list(self.scores.values())
        if not values:
            return {}
        return {"min": min(values), "med": statistics.median(values), "max": max(values)}

    def record(self) -> dict[str, Any]:
        """Returns the structured record, of plain JSON values."""
        flagged = [{"rank": rank, "node": self.nodes[rank], "score": self.scores[rank]} for rank in self.flagged]
        return {"of": self.subject, "kind": self.kind, **self.spread(), "threshold": self.threshold, "flagged": flagged}

    def _line(self, rank: int) -> str:
        return f"  Rank={rank} Node={self.nodes[rank]} Score={self.scores[rank]:.2f}"


def findings(report: Report, thresholds: Mapping[str, float]) -> list[RankScores]:
    """Returns one finding for each kind of scores in `thresholds`.

    Args:
        report: the report of all ranks.
        thresholds: kind -> the score below which a rank is a straggler.
    """
    of_kinds = {
        "relative": (report.gpu_relative_perf_scores, report.section_relative_perf_scores),
        "individual": (report.gpu_individual_perf_scores, report.section_individual_perf_scores),
    }
    return [_finding(kind, report, *of_kinds[kind], threshold) for kind, threshold in thresholds.items()]


def _finding(
    kind: str,
    report: Report,
    gpus: Mapping[int, float],
    sections: Mapping[str, Mapping[int, float]],
    threshold: float,
) -> RankScores:
    if report.has_kernels:
        subject = "GPU"
        scores = {rank: score for rank, score in gpus.items() if not math.isnan(score)}
    else:
        subject = "Section"
        scores = _lowest(sections)
    ordered = dict(sorted(scores.items(), key=lambda item: (item[1], item[0])))
    return RankScores(subject, kind, ordered, threshold, report.rank_to_node)


def _lowest(sections: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Returns the lowest section score of each rank. The section around the whole step counts only when it is alone."""
    inside = [scores for name, scores in sections.items() if name != STEP_SECTION] or list(sections.values())
    ranks = {rank for scores in inside for rank in scores}
    return {rank: min(scores[rank] for scores in inside if rank in scores) for rank in ranks}
