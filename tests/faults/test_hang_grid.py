"""The grid of hangs: which runs it plans, and which answers it takes as right. Pure: no job runs here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scripts.hang_grid import KINDS, Run, judged, judged_by_the_told, plan, table


def test_kinds_sizes_and_agents_are_covered_evenly() -> None:
    runs = plan(96, list(KINDS), [4, 8], [1, 2, 4], 1)
    assert set(Counter(run.kind for run in runs).values()) == {6}
    assert set(Counter((run.kind, run.ranks, run.agents) for run in runs).values()) == {1}
    in_turn = Counter((run.ranks, run.agents) for run in runs[: len(KINDS)])
    assert max(in_turn.values()) - min(in_turn.values()) <= 1
    assert all(run.culprit < run.ranks for run in runs)


def test_a_run_is_the_same_whatever_others_are_asked_for() -> None:
    assert plan(200, list(KINDS), [4, 8], [1], 7)[:20] == plan(20, list(KINDS), [4, 8], [1], 7)
    assert plan(200, list(KINDS), [4, 8], [1], 7) != plan(200, list(KINDS), [4, 8], [1], 8)


def fault(rank: int, finding: str, *blamed: int, collateral: bool = False) -> dict[str, Any]:
    return {
        "rank": rank,
        "finding": finding,
        "blamed": list(blamed),
        "collateral": collateral,
        "what": "hangs",
        "hint": "",
    }


@pytest.mark.parametrize(
    ("kind", "faults", "codes", "outcome"),
    [
        ("sleeps", [fault(1, "behind", 1)], [85], "named"),
        ("sleeps", [fault(1, "")], [85], "named"),
        ("sleeps", [fault(2, "behind", 2)], [85], "wrong"),
        ("sleeps", [fault(1, "behind", 1, 2)], [85], "wrong"),
        ("sleeps", [fault(2, "unknown", collateral=True)], [85], "unknown"),
        ("sleeps", [fault(1, "behind", 1), fault(2, "")], [85, 85], "wrong"),
        ("sleeps", [], [85], "unknown"),
        ("sleeps", [fault(1, "behind", 1)], [85, None], "unknown"),
        ("another order", [fault(2, "deadlock", 1, 2)], [85], "named"),
        ("another order", [fault(2, "deadlock", 2, 3)], [85], "wrong"),
        ("another order", [fault(1, "deadlock", 2, 3)], [85], "wrong"),
        ("another order", [fault(0, "deadlock", 0, 1, 2, 3)], [85], "unknown"),
        ("sleeps", [fault(1, "deadlock", 0, 1, 2, 3)], [85], "wrong"),
        ("sleeps", [fault(2, "mismatch", 1, 2)], [85], "wrong"),
        ("returns early", [fault(2, "", collateral=True)], [1], "unknown"),
        ("is slow", [], [0, 0], "named"),
        ("is slow", [fault(1, "behind", 1)], [85], "wrong"),
        ("is slow", [], [1], "wrong"),
    ],
)
def test_what_is_right(kind: str, faults: list[dict[str, Any]], codes: list[int | None], outcome: str) -> None:
    run = Run(1, kind, ranks=4, agents=1, culprit=1, by_mesh=False)
    assert judged(run, faults, codes)[0] == outcome


@pytest.mark.parametrize(
    ("kind", "finding", "ranks", "codes", "outcome"),
    [
        ("sleeps", "behind", [[1], [1]], [0], "named"),
        ("sleeps", "behind", [[1], [2]], [0], "wrong"),
        ("sleeps", "behind", [[1], []], [0], "unknown"),
        ("sleeps", "behind", [], [0], "unknown"),
        ("dies", "", [[1], [1]], [0], "named"),
        ("dies", "", [[1, 2]], [0], "wrong"),
        ("another order", "deadlock", [[1, 2]], [0], "named"),
        ("another order", "deadlock", [[2, 3]], [0], "wrong"),
        ("another order", "deadlock", [[0, 1, 2, 3]], [0], "unknown"),
        ("is slow", "", [], [0], "named"),
        ("is slow", "behind", [[1]], [0], "wrong"),
        ("is slow", "", [], [None], "unknown"),
        ("is slow", "", [], [1], "wrong"),
    ],
)
def test_what_is_right_to_be_told(
    kind: str, finding: str, ranks: list[list[int]], codes: list[int | None], outcome: str
) -> None:
    run = Run(1, kind, ranks=4, agents=1, culprit=1, by_mesh=False)
    told = [{"ranks": of_one, "finding": finding, "text": ""} for of_one in ranks]
    assert judged_by_the_told(run, told, [], codes)[0] == outcome


@pytest.mark.parametrize(("rank", "outcome"), [(1, "named"), (2, "wrong")])
def test_where_nobody_is_called_again_the_fault_counts(rank: int, outcome: str) -> None:
    run = Run(1, "dies", ranks=4, agents=4, culprit=1, by_mesh=False)
    assert judged_by_the_told(run, [], [fault(rank, "")], [137] * 4)[0] == outcome


def test_the_table() -> None:
    counts = {
        ("sleeps", 1): Counter(named=2),
        ("sleeps", 4): Counter(named=1, unknown=1),
        ("stops", 1): Counter(named=1),
    }
    assert table(counts, "python -m scripts.hang_grid").splitlines()[2:] == [
        "| what goes wrong | right | runs | named | unknown | wrong | named on 1 | named on 4 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| sleeps | the rank | 4 | 3 | 1 | 0 | 2/2 | 1/2 |",
        "| stops | the rank | 1 | 1 | 0 | 0 | 1/1 | 0/0 |",
        "| all |  | 5 | 4 | 1 | 0 | 3/3 | 1/2 |",
    ]
