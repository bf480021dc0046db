"""The score of a rank in a report of straggler detection. Pure.

Called by whatever reads reports: the status of a running job, and the report on its journals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rank_monitor.contract.wire.json_record import real


def score_of(sections: Any, gpu: Any, kind: str) -> float | None:
    """Returns the `relative` or `individual` score of a rank, in (0, 1], 1 for the fastest; None: it has none.

    Args:
        sections: of its report: section -> its scores.
        gpu: the scores of its kernels. Where it has none, the lowest score of its sections stands for them.
    """
    scored = []
    if isinstance(gpu, Mapping):
        scored = [real(gpu, kind)]
    if isinstance(sections, Mapping) and not any(score is not None for score in scored):
        scored = [real(section, kind) for section in sections.values() if isinstance(section, Mapping)]
    return min((score for score in scored if score is not None), default=None)
