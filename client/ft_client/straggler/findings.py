"""What is said of a report: printed lines, warnings, the structured record. Pure; the wording is what people grep.

Where no rank has kernels to compare (no CUDA) a rank's score is the lowest of its sections, and the words say so. The
section around the whole step counts only when there is no other: in it, all ranks wait for the slowest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_client.straggler.options import StragglerOptions
from ft_client.straggler.report import Report

STEP_SECTION = "train_step"
_WARNINGS = {
    ("GPU", "relative"): "Some GPUs have worse relative performance.",
    ("GPU", "individual"): "Some GPUs performance dropped.",
    ("Section", "relative"): "Some ranks have worse relative performance.",
    ("Section", "individual"): "Some ranks performance dropped.",
}


@dataclass(frozen=True)
class Finding:
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
        """The worst and the best, at most `shown` of each."""
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
        """The warning, when any rank is flagged."""
        words = _WARNINGS[self.subject, self.kind]
        return f"STRAGGLER DETECTION WARNING: {words} Affected ranks: {self.flagged}" if self.flagged else None

    def record(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = list(self.scores.values())
        flagged = [{"rank": rank, "node": self.nodes[rank], "score": self.scores[rank]} for rank in self.flagged]
        spread = {"min": min(values), "med": statistics.median(values), "max": max(values)} if values else {}
        return {"of": self.subject, "kind": self.kind, **spread, "threshold": self.threshold, "flagged": flagged}

    def _line(self, rank: int) -> str:
        return f"  Rank={rank} Node={self.nodes[rank]} Score={self.scores[rank]:.2f}"


def findings(report: Report, options: StragglerOptions) -> list[Finding]:
    """The findings of the kinds that were asked for."""
    found = []
    for kind in ("relative", "individual"):
        if getattr(options, f"calc_{kind}_gpu_perf"):
            gpus: Mapping[int, float] = getattr(report, f"gpu_{kind}_perf_scores")
            known = {rank: score for rank, score in gpus.items() if not math.isnan(score)}
            lowest = _lowest(getattr(report, f"section_{kind}_perf_scores"))
            subject, scores = ("GPU", known) if report.has_kernels else ("Section", lowest)
            ordered = dict(sorted(scores.items(), key=lambda one: (one[1], one[0])))
            threshold = getattr(options, f"gpu_{kind}_perf_threshold")
            found.append(Finding(subject, kind, ordered, threshold, report.rank_to_node))
    return found


def _lowest(sections: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    inside = [scores for name, scores in sections.items() if name != STEP_SECTION] or list(sections.values())
    ranks = {rank for scores in inside for rank in scores}
    return {rank: min(scores[rank] for scores in inside if rank in scores) for rank in ranks}
