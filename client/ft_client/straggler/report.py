"""What one report says, and who is slow by it. Pure: made of values, knows no clock, no group."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_client.straggler.samples import Summary

THRESHOLD = 0.75
"""A score below is slow, where nothing else is said."""


@dataclass(frozen=True)
class StragglerId:
    """A rank that is slow, and the node it runs on."""

    rank: int
    node: str


@dataclass(frozen=True)
class Scores:
    """Relative or individual scores of one rank; NaN for a GPU without kernels to compare."""

    gpu: float
    sections: Mapping[str, float]


@dataclass(frozen=True)
class Report:
    """Scores in (0, 1]: all ranks' on rank 0, or the own ones where nothing was gathered.

    GPU scores by rank, section scores by section and rank; empty where they were not to be computed. The summaries are
    this rank's own: sections in ms, kernels in us. `generate_report_elapsed_time` is in seconds.
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
        """The ranks whose score is below a threshold; NaN is not.

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
            "straggler_sections_relative": self._each(self.section_relative_perf_scores, section_rel_threshold),
            "straggler_sections_individual": self._each(self.section_individual_perf_scores, section_indiv_threshold),
        }

    def _each(self, scores: Mapping[str, Mapping[int, float]], threshold: float) -> dict[str, set[StragglerId]]:
        found = {name: self._below(of_ranks, threshold) for name, of_ranks in scores.items()}
        return {name: slow for name, slow in found.items() if slow}

    def _below(self, scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
        return {StragglerId(rank, self.rank_to_node[rank]) for rank, score in scores.items() if score < threshold}


def check_threshold(name: str, value: object) -> None:
    """Nothing for a number in (0, 1].

    Raises:
        ValueError: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r}: a threshold must be a number above 0 and at most 1")


def row_of(scores: Scores | None, names: Collection[str]) -> list[float]:
    """The scores of one rank and kind as it sends them: the GPU's, then the sections' in order; NaN: there is none."""
    if scores is None:
        return [math.nan] * (1 + len(names))
    return [scores.gpu, *(scores.sections.get(name, math.nan) for name in names)]


def tables_of(
    rows: Mapping[int, list[float]], names: Collection[str], begin: int
) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """GPU and section scores of all ranks, from the part of their rows that begins at `begin`."""
    gpus = {rank: row[begin] for rank, row in rows.items()}
    sections: dict[str, dict[int, float]] = {}
    for index, name in enumerate(names, begin + 1):
        found = {rank: row[index] for rank, row in rows.items() if not math.isnan(row[index])}
        if found:
            sections[name] = found
    return gpus, sections
