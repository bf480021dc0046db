"""What journals written by hand say of their jobs: time, faults and what each cost."""

from __future__ import annotations

import json
import math

import pytest

from ft_launcher.tools.report.collection import Collection
from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.job_findings import Saves
from tests.ft_launcher.tools.report.lines import (
    NODE_A,
    NODE_B,
    RECOVERY,
    Line,
    begins,
    collected,
    durations,
    end,
    fault,
    found,
    limits,
    line,
    part,
    start,
    steps,
)


def test_nothing_to_tell_of() -> None:
    assert find(Collection()) is None
    assert find(collected([{"v": 1, "t": 1, "event": "of_a_later_release"}])) is None


def test_two_attempts_of_two_nodes() -> None:
    findings = found(NODE_A, NODE_B)
    assert (findings.run_ids, findings.nodes, findings.attempts) == (["job"], ["a", "b"], 2)
    assert (findings.began, findings.ended, findings.wall_s) == (100, 231, 131)
    assert (findings.exit_code, findings.ranks) == (0, 4)
    assert math.isclose(sum(findings.seconds.values()), 131)
    assert {name: findings.seconds[name] for name in ("step", "lost_progress", "checkpoint_save", "reschedule")} == {
        "step": 25,
        "lost_progress": 5,
        "checkpoint_save": 6,
        "reschedule": 40,
    }
    assert findings.goodput == pytest.approx(25 / 131)
    assert findings.shares()[0][0] == "launch"


@pytest.mark.parametrize("names", ["abc", "cba", "bca"])
def test_journals_are_taken_in_any_order(names: str) -> None:
    timed = steps(0, 300, 310, 0, 9, durations={"step": durations(10, 1.5)})
    later = [start(300, "c"), begins(301, 0), limits(302, step=40), fault(309, 0), timed, end(310)]
    journals = {"a": [*NODE_A[:2], limits(106, step=20), *NODE_A[2:]], "b": NODE_B, "c": later}
    given = [journals[name] for name in names]
    findings = found(*given)
    assert [section.limit_s for section in findings.sections] == [40]
    assert find(collected(*given, in_turn=True)) == findings


def test_each_fault_counts_once_with_what_it_cost() -> None:
    first, second = found(NODE_A, NODE_B).faults
    assert (first.kind, first.rank, first.node, first.cycle, first.attempt) == ("signal", 3, "b", 0, 1)
    # Of its own node's journal, which knows when it began.
    assert first.phases == RECOVERY | {"detection": 1.25}
    assert (first.recovery_s, first.lost_s, first.cost_s) == (8.25, 5, 13.25)
    assert (first.ranks, first.rank_s) == (4, 13.25 * 4)
    # No cycle of its attempt follows.
    assert (second.kind, second.phases) == ("hang", {"detection": 0, "stop": 0, "reschedule": 40})


def test_means_by_class() -> None:
    findings = found(NODE_A, NODE_B)
    assert [(one.name, one.faults, one.mtbf_s, one.mttr_s) for one in findings.classes] == [
        ("hang", 1, 131, 40),
        ("memory", 1, 131, 8.25),
    ]
    assert (findings.mtbf_s, findings.mttr_s) == (65.5, (40 + 8.25) / 2)
    assert findings.node_faults == {"b": 2}
    assert findings.cost_s == 53.25


def test_the_checkpoints() -> None:
    assert found(NODE_A, NODE_B).saves == Saves(2, 3.0, 10.0)
    assert found(NODE_B).saves is None


def test_without_a_fault() -> None:
    findings = found([start(0), begins(1, 0), steps(0, 0, 20, 0, 9), part(None, 20, 21), end(21)])
    assert (findings.faults, findings.mtbf_s, findings.mttr_s, findings.cost_s) == ((), None, None, 0)
    assert findings.goodput == pytest.approx(10 / 21)


def test_the_node_of_a_fault_is_lost() -> None:
    (only,) = found(NODE_A).faults
    assert (only.kind, only.rank, only.node, only.what) == ("node", None, "", "rank 3 failed")
    assert only.phases == RECOVERY


def test_an_attempt_that_was_killed() -> None:
    killed = [start(0), begins(1, 0), part(0, 0, 20), start(50), begins(51, 0), part(0, 50, 60), end(60)]
    (only,) = found(killed).faults
    assert (only.kind, only.cycle, only.phases, only.ranks) == ("attempt", None, {"reschedule": 30}, 2)
    assert found(killed[:3]).faults == ()
    assert found(killed[:3]).exit_code is None


def test_of_several_faults_of_a_cycle_the_cause_counts() -> None:
    lines = [start(0), begins(1, 0), fault(5, 0, rank=0, collateral=True), end(9, 80)]
    other = [start(0, "b"), begins(1, 0, 1), fault(6, 0, rank=2), end(9, 80)]
    (only,) = found(lines, other).faults
    assert (only.rank, only.ranks) == (2, 4)


def test_nodes_of_one_host_name() -> None:
    findings = found([start(0), begins(1, 0), end(9)], [start(0), begins(1, 0, 1), end(9)])
    assert (findings.nodes, findings.node_count, findings.ranks) == (["a"], 2, 4)


def test_a_node_of_a_high_rank_keeps_enough_points() -> None:
    """Where only its journal is given, lost progress is as exact as elsewhere."""
    points = [[number, float(number)] for number in range(64)]
    first = part(0, 0, 100, seconds={"step": 63.0}, steps=63, resumed=0, iteration=63, points=points)
    again = part(1, 100, 120, seconds={"step": 5.0}, steps=5, resumed=60, iteration=65, points=[[60, 0.0], [65, 5.0]])
    lines = [start(0), begins(1, 0, 100), first, fault(100, 0), begins(101, 1, 100), again, end(120)]
    assert len(collected(lines).launches[0].parts[0].points) < 20
    assert found(lines).faults[0].lost_s == 3
    assert found([*lines[:2], part(0, 0, 50) | {"points": []}, end(60)]).attempts == 1


def test_restarts_in_process() -> None:
    why = [{"rank": 1, "interruption": "exception", "error": "ValueError"}]
    lines = [
        start(0),
        begins(1, 0),
        line("in_process_restart", 5, cycle=0, iteration=1, took_s=2.0, why=why),
        line("in_process_fault", 8, cycle=0, rank=0, fault_class="memory", what="died"),
        line("in_process_restart", 9, cycle=0, iteration=2, took_s=3.0, why=[]),
        part(0, 0, 20, seconds={"lost_progress": 4.0}),
        end(20),
    ]
    other = [
        start(0, "b"),
        begins(1, 0, 1),
        line("in_process_restart", 5, cycle=0, iteration=1, took_s=2.5, why=why),
        end(20),
    ]
    first, second = found(lines, other).faults
    assert (first.kind, first.rank, first.what, first.phases) == ("exception", 1, "ValueError", {"in_process": 2.5})
    assert (second.kind, second.rank, second.fault_class, second.lost_s) == ("exit", 0, "memory", 2.0)
    assert first.in_process and second.in_process


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ([{"rank": 1, "member": 5, "interruption": "EXCEPTION", "error": "x"}], [("exception", "unknown", 5)]),
        ([{"rank": 1, "interruption": "SOFT_TIMEOUT"}], [("hang", "hang", 1)]),
        ([{"rank": 1, "interruption": "TERMINATED"}], [("exit", "unknown", 1)]),
        (["x", {"rank": 0, "interruption": "EXCEPTION", "collateral": True}], [("unknown", "unknown", None)]),
        ([{"rank": 2, "member": 2, "interruption": "JOINING"}], []),
    ],
    ids=["exception", "hang", "death", "collateral", "a rank joins"],
)
def test_why_ranks_restart_in_process(why: list[object], expected: list[tuple[str, str, int | None]]) -> None:
    restart = line("in_process_restart", 5, cycle=0, iteration=1, took_s=2.0, why=why)
    faults = found([start(0), begins(1, 0), restart, end(20)]).faults
    assert [(known.kind, known.fault_class, known.rank) for known in faults] == expected


def test_a_restart_in_process_that_did_not_help_is_one_fault() -> None:
    lines = [start(0), begins(1, 0), line("in_process_fault", 3, cycle=0, rank=0), fault(5, 0, rank=0), end(9, 80)]
    assert [known.in_process for known in found(lines).faults] == [False]


def test_the_slowest_ranks() -> None:
    def times(rank: int, gpu: float | None, section: float) -> Line:
        return line("section_times", 2, rank=rank, gpu={"relative": gpu}, sections={"fwd": {"relative": section}})

    lines = [start(0), times(0, 1.0, 0.1), times(1, 0.5, 1.0), times(1, 0.7, 1.0), times(2, None, 0.9)]
    slowest = found([*lines, line("section_times", 3, rank=7, gpu=3, sections=[])]).slowest
    assert [(slow.rank, round(slow.score, 3), slow.reports) for slow in slowest] == [
        (1, 0.6, 2),
        (2, 0.9, 1),
        (0, 1.0, 1),
    ]


def test_of_a_cycle_that_runs_the_last_line_is_kept() -> None:
    lines = [start(0), begins(1, 0), *(part(0, 0, 10.0 * (number + 1)) for number in range(1000))]
    collection = collected(lines)
    assert len(collection.launches[0].parts) == 1
    findings = find(collection)
    assert findings is not None and findings.wall_s == 10000


@pytest.mark.parametrize(
    "wrong",
    [
        fault(5, 0, rank="x", kind=3, what=["x"], iteration=None),
        line("fault", 5),
        line("cycle_start", 5, cycle="0", ranks=3),
        line("cycle_start", 5, cycle=1, ranks=3),
        line("cycle_end", 5, cycle=None, how=3),
        line("in_process_restart", 5, why="x", took_s="x"),
        line("in_process_restart", 5, cycle=0, took_s=1e308),
        line("job_end", 5, exit_code="x"),
        part(0, 0, 20) | {"seconds": {"a": 1e308, "b": 1e308}},
        part(0, 0, 20) | {"since": -1e300},
        line("ledger", 5, cycle=0),
    ],
    ids=lambda wrong: wrong["event"],
)
def test_a_line_that_does_not_fit(wrong: Line) -> None:
    findings = found([start(0), begins(1, 0), wrong, steps(0, 0, 20, 0, 9), end(21)])
    json.dumps(findings.as_json(), allow_nan=False)
    assert math.isclose(sum(findings.seconds.values()), findings.wall_s)


def test_json_has_all_of_it() -> None:
    findings = found(NODE_A, NODE_B)
    read = json.loads(json.dumps(findings.as_json(), allow_nan=False))
    assert read["version"] == 1
    assert read["faults"][0]["phases"] == findings.faults[0].phases
    assert read["seconds"] == findings.seconds
    assert read["saves"] == {"count": 2, "mean_s": 3.0, "interval_s": 10.0}


def test_a_cycle_whose_end_is_missing_ends_with_the_next_one() -> None:
    cycles = found([start(0), begins(1, 0), begins(40, 1), end(90)]).cycles
    assert [(cycle.cycle, cycle.began, cycle.ended) for cycle in cycles] == [(0, 1, 40), (1, 40, 90)]
