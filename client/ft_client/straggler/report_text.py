"""Makes printed lines, warnings and the structured record from a report. Pure; people search for the wording.

Where no rank has kernels to compare (no CUDA) a rank's score is the lowest of its sections, and the texts say so. The
section around the whole step counts only when there is no other: in it, all ranks wait for the slowest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_client.straggler.reporting import Report

STEP_SECTION = "train_step"
_WARNINGS = {
    ("GPU", "relative"): "Some GPUs have worse relative performance.",
    ("GPU", "individual"): "Some GPUs performance dropped.",
    ("Section", "relative"): "Some ranks have worse relative performance.",
    ("Section", "individual"): "Some ranks performance dropped.",
}


@dataclass(frozen=True)
class RankScores:
    """The scores of one kind ("relative", "individual") by rank, none of them NaN; the worst first."""

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
        """Returns the lines that name the worst and the best ranks, at most `shown` of each."""
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
        """Returns the warning, when any rank is flagged."""
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
    """Returns the findings of the kinds of scores in `thresholds`; a score below its threshold is a straggler's."""
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
    inside = [scores for name, scores in sections.items() if name != STEP_SECTION] or list(sections.values())
    ranks = {rank for scores in inside for rank in scores}
    return {rank: min(scores[rank] for scores in inside if rank in scores) for rank in ranks}
