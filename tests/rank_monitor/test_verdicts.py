"""What a verdict says, and the line that people grep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import Heartbeat, Sections
from tests.rank_monitor.timeline import RANK_PID, STARTED_S, Timeline, limited, ns, verdicts

T = STARTED_S


# What a verdict says.


def test_a_verdict_names_limit_rank_place_and_time() -> None:
    settings = limited(MonitorSettings(), rank_section_timeouts={"step": 20.0})
    line = Timeline(settings)
    line.attach()
    line.say(Sections((("setup", ns(T + 1)),), iteration=41), T + 1)
    line.open("setup", "step", at=T + 2)
    (verdict,) = verdicts(line.until(T + 22))
    assert (verdict.cycle, verdict.rank, verdict.pid) == (1, 3, RANK_PID)
    assert (verdict.limit, verdict.limit_s, verdict.iteration) == ("section:step", 20.0, 41)
    assert verdict.sections == {"setup": 21.0, "step": 20.0}
    assert verdict.condemned
    assert verdict.line == "Section 'step' has been open for 20.00 seconds. Timeout is 20.00 seconds."
    assert (
        verdict.reason
        == "section 'step' open for 20.00 s; the limit is 20 s (rank_section_timeouts), exceeded by 0.000 s"
    )


@pytest.mark.parametrize(("beats", "word", "waited"), [(0, "initial", "3600.00"), (1, "subsequent", "2700.00")])
def test_the_line_that_people_grep(beats: int, word: str, waited: str) -> None:
    line = Timeline(replace(MonitorSettings(), stall_warning=None))
    line.attach()
    for _ in range(beats):
        line.say(Heartbeat())
    (verdict,) = verdicts(line.until(T + 3600))
    assert verdict.line == f"Did not get {word} heartbeat. Waited {waited} seconds."
