"""What is printed, word by word."""

from __future__ import annotations

import dataclasses
import math

from ft_client.straggler import Report, StragglerOptions
from ft_client.straggler.report_text import findings

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
