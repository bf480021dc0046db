"""What the monitor is told of a report: this rank's own times and scores, by one message, without another collective.

Without a launcher nobody is told. Never waits, never raises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from ft_client import process
from ft_client.straggler.report import Scores
from ft_client.straggler.samples import Statistic, Summary
from rank_monitor.contract.messages import SectionTimes

_MAX_SECTIONS = 64
_MAX_NAME = 100


def tell(sections: Mapping[str, Summary], relative: Scores | None, individual: Scores | None) -> None:
    """Posts the sections that took most of the time, and the scores of kernels."""
    link = process.current()
    if link is not None:
        link.post(message_of(sections, relative, individual), time.monotonic_ns())


def message_of(sections: Mapping[str, Summary], relative: Scores | None, individual: Scores | None) -> SectionTimes:
    """The message, bounded in size whatever the sections are."""
    kinds = {"relative": relative, "individual": individual}
    longest = sorted(sections, key=lambda name: -sections[name][Statistic.NUM] * sections[name][Statistic.AVG])
    return SectionTimes(
        {
            name[-_MAX_NAME:]: {
                "med_ms": sections[name][Statistic.MED],
                "num": int(sections[name][Statistic.NUM]),
                **{kind: of.sections.get(name) if of else None for kind, of in kinds.items()},
            }
            for name in longest[:_MAX_SECTIONS]
        },
        {kind: None if of is None or math.isnan(of.gpu) else of.gpu for kind, of in kinds.items()},
    )
