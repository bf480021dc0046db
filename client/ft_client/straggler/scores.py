"""Scores from medians: how fast a rank was, as a share of a reference. Pure: knows no clock, no group, no torch.

    section score = median of the reference / own median
    GPU score     = mean over kernels of (median of the reference / own median), weighted by NUM x AVG of the own kernel

The reference of a relative score is the smallest median among the ranks, that of an individual score the rank's own
best median so far. A score is in (0, 1]; 0.5 is half as fast. It is NaN only for a GPU without a kernel to compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ft_client.straggler.samples import Statistic, Summary

_SMALLEST = 1e-9  # below what any clock here can tell: a median of zero is as good as this one


def medians(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The median of each."""
    return {name: summary[Statistic.MED] for name, summary in summaries.items()}


def score(reference: float, median: float) -> float:
    """One median against its reference, in (0, 1]."""
    return min(1.0, max(reference, _SMALLEST) / max(median, _SMALLEST))


def section_scores(references: Mapping[str, float], summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The score of each section that has a reference."""
    own = medians(summaries)
    return {name: score(references[name], median) for name, median in own.items() if name in references}


def gpu_score(references: Mapping[str, float], summaries: Mapping[str, Summary]) -> float:
    """The score of all kernels that have a reference; NaN when none has."""
    total = weighted = 0.0
    for name, summary in summaries.items():
        if name in references:
            weight = max(summary[Statistic.NUM] * summary[Statistic.AVG], _SMALLEST)
            weighted += weight * score(references[name], summary[Statistic.MED])
            total += weight
    return min(1.0, weighted / total) if total else math.nan


def best(former: Mapping[str, float], summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The smallest median so far of everything ever seen: the reference of individual scores."""
    own = medians(summaries)
    return {**former, **{name: min(median, former.get(name, median)) for name, median in own.items()}}
