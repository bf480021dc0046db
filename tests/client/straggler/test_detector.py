"""The detector in a process that is alone: no group is needed."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ft_client.rank.monitoring import process
from ft_client.straggler import Detector, Report, Statistic
from ft_client.straggler.detector import INDIVIDUAL, Detection
from ft_client.straggler.kernels import MAX_KERNELS
from rank_monitor.contract.wire.messages import SectionTimes
from tests.client.fake_monitor import FakeMonitor
from tests.client.straggler.rank_parts import recorded


def report_of() -> Report:
    report = Detector.generate_report()
    assert report is not None
    return report


def enter(name: str | None, times: int, pause_s: float = 0.0) -> None:
    for _ in range(times):
        with Detector.detection_section(name):
            time.sleep(pause_s)


def test_a_rank_alone() -> None:
    Detector.initialize(node_name="here")
    enter("work", 5, 0.002)
    report = report_of()
    assert report.section_relative_perf_scores == report.section_individual_perf_scores == {"work": {0: 1.0}}
    assert all(map(math.isnan, [report.gpu_relative_perf_scores[0], report.gpu_individual_perf_scores[0]]))
    summary = report.local_section_summaries["work"]
    assert summary[Statistic.NUM] == 5 and summary[Statistic.MIN] >= 2.0  # ms
    assert (report.rank_to_node, report.rank, report.gather_on_rank0) == ({0: "here"}, 0, True)
    assert report.generate_report_elapsed_time > 0
    assert not any(report.identify_stragglers().values())


def test_a_report_is_on_what_came_since_the_last_one() -> None:
    Detector.initialize()
    enter("once", 1)
    report_of()
    enter("later", 2)
    assert list(report_of().section_relative_perf_scores) == ["later"]
    empty = report_of()
    assert empty.section_relative_perf_scores == empty.local_section_summaries == {}


def test_a_rank_that_slows_down_is_told_by_its_own_past() -> None:
    Detector.initialize(scores_to_compute=["individual_perf_scores"], gather_on_rank0=False)
    scores = []
    for pause_s in (0.1, 0.1, 0.4, 0.1):  # long beside a late wake-up on a busy machine
        enter("work", 6, pause_s)
        scores.append(report_of())
    slow = [bool(one.identify_stragglers()["straggler_sections_individual"]) for one in scores]
    assert slow == [False, False, True, False]
    assert all(one.gpu_relative_perf_scores == one.section_relative_perf_scores == {} for one in scores)


def test_every_so_manieth_entry_is_timed() -> None:
    Detector.initialize(profiling_interval=3)
    enter("work", 10)
    assert report_of().local_section_summaries["work"][Statistic.NUM] == 3


def test_a_raising_entry_is_not_recorded() -> None:
    Detector.initialize()
    enter("work", 2)
    with pytest.raises(KeyError), Detector.detection_section("work"):
        raise KeyError("of the user")
    enter("work", 1)
    assert report_of().local_section_summaries["work"][Statistic.NUM] == 3


def test_a_section_without_a_name_is_where_it_stands() -> None:
    Detector.initialize()
    enter(None, 3)
    (name,) = report_of().local_section_summaries
    path, _, line = name.rpartition(":")
    assert path == __file__ and int(line) == enter.__code__.co_firstlineno + 2


def test_sections_inside_sections() -> None:
    Detector.initialize()
    with Detector.detection_section("outer"):
        enter("inner", 4)
    assert {name: of[Statistic.NUM] for name, of in report_of().local_section_summaries.items()} == {
        "outer": 1,
        "inner": 4,
    }


def test_a_section_entered_twice_is_named_and_the_outer_one_goes_on() -> None:
    Detector.initialize()
    with Detector.detection_section("work"):
        with pytest.raises(RuntimeError, match="name='work': the section is open already"):
            enter("work", 1)
        enter("other", 1)
    assert set(report_of().local_section_summaries) == {"work", "other"}


@pytest.mark.parametrize("name", ["", 7, b"work"])
def test_names_that_are_none(name: Any) -> None:
    Detector.initialize()
    with pytest.raises(ValueError, match=r"name=.*must be a text that is not empty"):
        Detector.detection_section(name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scores_to_compute": "relative"}, "scores_to_compute='relative': give \"all\""),
        ({"scores_to_compute": ["relative_perf_scores", "gpu"]}, "scores_to_compute="),
        ({"scores_to_compute": []}, "scores_to_compute="),
        ({"scores_to_compute": [1]}, "scores_to_compute="),
        ({"scores_to_compute": None}, "scores_to_compute="),
        ({"profiling_interval": 0}, "profiling_interval=0"),
        ({"profiling_interval": 1.0}, "profiling_interval=1.0"),
        ({"profiling_interval": True}, "profiling_interval=True"),
        ({"report_time_interval": 0}, "report_time_interval=0"),
        ({"report_time_interval": math.nan}, "report_time_interval=nan"),
        ({"report_time_interval": "60"}, "report_time_interval='60'"),
        ({"node_name": 3}, "node_name=3"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Detector.initialize(**arguments)
    assert not Detector.initialized


@pytest.mark.parametrize(
    "call",
    [
        lambda: Detector.detection_section("work"),
        lambda: Detector.wrap_callables([]),
        Detector.generate_report,
        Detector.generate_report_if_interval_elapsed,
        Detector.is_interval_elapsed,
    ],
)
def test_before_initialize_and_after_shutdown(call: Any) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call Detector.initialize\(\) first"):
            call()
        Detector.restore_original_callables()
        Detector.initialize()
        Detector.shutdown()


def test_kernels_that_are_always_new_are_bounded() -> None:
    """Beyond the bound they are not compared; those known before still are."""
    detection = Detection([INDIVIDUAL], False, profiling_interval=1, interval_s=60.0, node="here")

    def score(took_us: float, *names: str) -> float:
        for name in names:
            detection.kernels.record(recorded(name, took_us))
        report = detection.report()
        assert report is not None
        return report.gpu_individual_perf_scores[0]

    turns = [["always", *(f"{turn} {index}" for index in range(300))] for turn in range(3)]
    assert MAX_KERNELS < 2 * 300
    assert [score(10.0, *names) for names in turns] == [1.0] * 3
    assert math.isnan(score(20.0, "2 0"))
    assert score(20.0, "always") == score(20.0, "0 299") == 0.5


def test_reports_at_the_interval() -> None:
    Detector.initialize(report_time_interval=0.03)
    made = 0
    for _ in range(40):
        enter("work", 1, 0.003)
        report = Detector.generate_report_if_interval_elapsed()
        assert (report is not None) == Detector.is_interval_elapsed()
        made += report is not None
    assert 1 <= made < 30


def test_a_report_reaches_the_monitor(monitor: FakeMonitor) -> None:
    process.start()
    Detector.initialize(scores_to_compute="individual_perf_scores", gather_on_rank0=False)
    with Detector.detection_section("work"):
        pass
    Detector.generate_report()
    (message,) = monitor.wait_for(SectionTimes)
    assert message.gpu == {"relative": None, "individual": None}
    assert message.sections["work"].pop("med_ms") >= 0
    assert message.sections == {"work": {"num": 1, "relative": None, "individual": 1.0}}
