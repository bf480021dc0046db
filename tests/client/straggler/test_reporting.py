"""Scores against their formulas, who is slow by a report, the message to the monitor; what is printed, word by word."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.straggler import Report, StragglerId, StragglerOptions, reporting
from ft_client.straggler.reporting import Scores, findings, section_times
from ft_client.straggler.samples import Statistic, Summary
from rank_monitor.contract.wire import codec

durations = st.floats(0, 1e9)
NAMES = ("a", "b", "c")
GPUS = Report(
    gpu_relative_perf_scores={0: 1.0, 13: 0.65, 76: 0.5, 99: math.nan},
    section_relative_perf_scores={"work": {0: 0.1}},
    gpu_individual_perf_scores={0: 0.9, 13: 0.8, 76: 0.69},
    section_individual_perf_scores={"work": {0: 0.1}},
    rank_to_node={0: "a", 13: "b", 76: "c", 99: "d"},
)
SECTIONS = dataclasses.replace(
    GPUS,
    gpu_relative_perf_scores={0: math.nan, 1: math.nan},
    gpu_individual_perf_scores={},
    section_relative_perf_scores={"train_step": {0: 0.2, 1: 1.0}, "load": {0: 0.9, 1: 1.0}, "work": {1: 0.6}},
    section_individual_perf_scores={"train_step": {0: 1.0, 1: 0.4}},
    rank_to_node={0: "a", 1: "b"},
)


def summary(med: float, num: float = 1.0, avg: float | None = None) -> Summary:
    return {Statistic.MED: med, Statistic.NUM: num, Statistic.AVG: med if avg is None else avg}


summaries = st.dictionaries(
    st.sampled_from(NAMES), st.builds(summary, durations, st.integers(1, 8192).map(float), durations), min_size=1
)


def lowest(ranks: list[dict[str, Summary]]) -> dict[str, float]:
    """What the MIN all-reduce gives."""
    return {
        name: min(one[name][Statistic.MED] for one in ranks if name in one)
        for name in NAMES
        if any(name in one for one in ranks)
    }


@given(st.lists(summaries, min_size=1, max_size=6))
def test_scores_are_above_0_and_at_most_1_and_the_fastest_has_1(ranks: list[dict[str, Summary]]) -> None:
    references = lowest(ranks)
    of_sections = [reporting.section_scores(references, one) for one in ranks]
    for found, one in zip(of_sections, ranks, strict=True):
        assert set(found) == set(one)
        assert all(0 < score <= 1 for score in found.values())
        assert min(found.values()) * 0.999999 <= reporting.gpu_score(references, one) <= max(found.values()) * 1.000001
    for name in references:
        assert max(found[name] for found in of_sections if name in found) == 1


@given(durations, durations, durations)
def test_a_slower_rank_has_no_better_score(reference: float, median: float, more: float) -> None:
    assert reporting.score(reference, median + more) <= reporting.score(reference, median)


@given(st.lists(summaries, min_size=1, max_size=8))
def test_individual_scores_compare_with_the_best_so_far(reports: list[dict[str, Summary]]) -> None:
    best: dict[str, float] = {}
    for index, one in enumerate(reports):
        best = reporting.best_medians(best, one)
        assert best == lowest(reports[: index + 1])
        assert all(0 < score <= 1 for score in reporting.section_scores(best, one).values())


@given(summaries, st.floats(1, 1e3))
def test_a_rank_that_is_slower_by_a_factor_has_its_inverse(one: dict[str, Summary], factor: float) -> None:
    one = {name: summary(1 + of[Statistic.MED], of[Statistic.NUM]) for name, of in one.items()}
    slower = {name: summary(of[Statistic.MED] * factor, of[Statistic.NUM]) for name, of in one.items()}
    assert reporting.gpu_score(reporting.medians(one), slower) == pytest.approx(1 / factor)
    assert reporting.section_scores(reporting.medians(one), slower) == pytest.approx(dict.fromkeys(one, 1 / factor))


def test_kernels_weigh_by_their_time() -> None:
    own = {"big": summary(10, 90, 20), "small": summary(10, 10, 20), "nobody else's": summary(1, 1e6)}
    assert reporting.gpu_score({"big": 5.0, "small": 10.0}, own) == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)


def test_no_kernel_to_compare_is_nan_and_nothing_else_is() -> None:
    assert math.isnan(reporting.gpu_score({}, {"a": summary(1)}))
    assert math.isnan(reporting.gpu_score({"a": 1.0}, {}))
    assert reporting.section_scores({}, {"a": summary(1)}) == {}
    assert reporting.score(0.0, 0.0) == 1
    assert reporting.gpu_score({"a": 0.0}, {"a": summary(0)}) == 1


REPORT = Report(
    gpu_relative_perf_scores={0: 1.0, 1: 0.74, 2: math.nan},
    section_relative_perf_scores={"load": {0: 1.0, 1: 0.75, 2: 0.3}, "work": {0: 0.9, 1: 1.0}},
    gpu_individual_perf_scores={0: 0.5, 1: 1.0, 2: math.nan},
    section_individual_perf_scores={"load": {0: 1.0}, "work": {1: 0.1}},
    rank_to_node={0: "a", 1: "a", 2: "b"},
)


def test_stragglers_by_the_default_thresholds() -> None:
    assert REPORT.identify_stragglers() == {
        "straggler_gpus_relative": {StragglerId(1, "a")},
        "straggler_gpus_individual": {StragglerId(0, "a")},
        "straggler_sections_relative": {"load": {StragglerId(2, "b")}},
        "straggler_sections_individual": {"work": {StragglerId(1, "a")}},
    }


def test_thresholds_of_their_own() -> None:
    found = REPORT.identify_stragglers(
        gpu_rel_threshold=0.5, section_rel_threshold=1.0, gpu_indiv_threshold=0.5, section_indiv_threshold=0.1
    )
    assert found == {
        "straggler_gpus_relative": set(),
        "straggler_gpus_individual": set(),
        "straggler_sections_relative": {
            "load": {StragglerId(1, "a"), StragglerId(2, "b")},
            "work": {StragglerId(0, "a")},
        },
        "straggler_sections_individual": {},
    }


@pytest.mark.parametrize(
    "name", ["gpu_rel_threshold", "section_rel_threshold", "gpu_indiv_threshold", "section_indiv_threshold"]
)
@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.nan, math.inf, "0.7", None, True])
def test_thresholds_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*above 0 and at most 1"):
        REPORT.identify_stragglers(**{name: value})


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.rank = 1  # type: ignore[misc]


def test_the_longest_sections_are_sent_and_the_message_fits() -> None:
    euros = "\u20ac" * 300
    sections = {
        f"{euros}{index:04d}": {Statistic.MED: 1.0, Statistic.NUM: 2.0, Statistic.AVG: float(index)}
        for index in range(500)
    }
    scores = Scores(math.nan, dict.fromkeys(sections, 1 / 3))
    message = section_times(sections, {"relative": scores, "individual": Scores(0.5, {})})
    assert len(codec.encode(message, 1, 1)) <= codec.MAX_MESSAGE
    assert [int(name[-4:]) for name in message.sections] == list(range(499, 435, -1))
    assert message.gpu == {"relative": None, "individual": 0.5}
    first = next(iter(message.sections.values()))
    assert first == {"med_ms": 1.0, "num": 2, "relative": 1 / 3, "individual": None}


def test_the_printed_lines_of_gpus() -> None:
    relative, individual = findings(GPUS, StragglerOptions().thresholds)
    assert relative.lines(2) == [
        "GPU relative performance:",
        " Worst performing 2/3 ranks:",
        "  Rank=76 Node=c Score=0.50",
        "  Rank=13 Node=b Score=0.65",
        " Best performing 2/3 ranks:",
        "  Rank=0 Node=a Score=1.00",
        "  Rank=13 Node=b Score=0.65",
    ]
    assert individual.lines(5)[:2] == ["GPU individual performance:", " Worst performing 3/3 ranks:"]
    assert individual.lines(0) == []
    prefix = "STRAGGLER DETECTION WARNING: Some GPUs"
    assert relative.warning() == f"{prefix} have worse relative performance. Affected ranks: [76, 13]"
    assert individual.warning() == f"{prefix} performance dropped. Affected ranks: [76]"


def test_without_kernels_the_lowest_section_of_a_rank_counts_and_the_whole_step_only_alone() -> None:
    relative, individual = findings(SECTIONS, StragglerOptions().thresholds)
    assert relative.scores == {1: 0.6, 0: 0.9}
    assert relative.lines(1) == [
        "Section relative performance:",
        " Worst performing 1/2 ranks:",
        "  Rank=1 Node=b Score=0.60",
        " Best performing 1/2 ranks:",
        "  Rank=0 Node=a Score=0.90",
    ]
    assert individual.scores == {1: 0.4, 0: 1.0}
    prefix = "STRAGGLER DETECTION WARNING: Some ranks"
    assert relative.warning() == f"{prefix} have worse relative performance. Affected ranks: [1]"
    assert individual.warning() == f"{prefix} performance dropped. Affected ranks: [1]"


def test_thresholds_and_kinds_are_the_options() -> None:
    options = StragglerOptions(calc_individual_gpu_perf=False, gpu_relative_perf_threshold=0.5)
    (relative,) = findings(GPUS, options.thresholds)
    assert (relative.flagged, relative.warning()) == ([], None)


def test_the_structured_record() -> None:
    record = findings(GPUS, StragglerOptions().thresholds)[0].record()
    assert record.pop("flagged") == [{"rank": 76, "node": "c", "score": 0.5}, {"rank": 13, "node": "b", "score": 0.65}]
    assert record == {"of": "GPU", "kind": "relative", "min": 0.5, "med": 0.65, "max": 1.0, "threshold": 0.7}


def test_a_report_of_nothing() -> None:
    nothing = Report({}, {}, {}, {}, {})
    for one in findings(nothing, StragglerOptions().thresholds):
        assert (one.lines(5), one.warning(), one.record()["flagged"]) == ([], None, [])
