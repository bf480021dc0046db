"""What the monitor is told: the own rank's times and scores, never more than a message can hold."""

from __future__ import annotations

import math

from ft_client import process
from ft_client.straggler import Detector, Statistic
from ft_client.straggler.report import Scores
from ft_client.straggler.told import message_of
from rank_monitor.contract import codec
from rank_monitor.contract.messages import SectionTimes
from tests.client.fake_monitor import FakeMonitor


def test_a_report_reaches_the_monitor(monitor: FakeMonitor) -> None:
    process.start()
    Detector.initialize(scores_to_compute="individual_perf_scores", gather_on_rank0=False)
    with Detector.detection_section("work"):
        pass
    Detector.generate_report()
    (told,) = monitor.wait_for(SectionTimes)
    assert told.gpu == {"relative": None, "individual": None}
    assert told.sections["work"].pop("med_ms") >= 0
    assert told.sections == {"work": {"num": 1, "relative": None, "individual": 1.0}}


def test_the_longest_sections_are_told_and_the_message_fits() -> None:
    euros = "\u20ac" * 300
    sections = {
        f"{euros}{index:04d}": {Statistic.MED: 1.0, Statistic.NUM: 2.0, Statistic.AVG: float(index)}
        for index in range(500)
    }
    scores = Scores(math.nan, dict.fromkeys(sections, 1 / 3))
    message = message_of(sections, scores, Scores(0.5, {}))
    assert len(codec.encode(message, 1, 1)) <= codec.MAX_MESSAGE
    assert [int(name[-4:]) for name in message.sections] == list(range(499, 435, -1))
    assert message.gpu == {"relative": None, "individual": 0.5}
    first = next(iter(message.sections.values()))
    assert first == {"med_ms": 1.0, "num": 2, "relative": 1 / 3, "individual": None}
