"""Which wait and which standstill is a hang, whose it is, and since when: tables of looks at ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.decide.attribution.fault import HangKind
from ft_launcher.decide.attribution.hang_clocks import Hang, HangClocks, RankSample, of_record, to_record
from ft_launcher.decide.attribution.rank_view import GroupState, RankView
from ft_launcher.decide.attribution.scene import Scene
from rank_monitor.contract.errors import ProtocolError

LIMIT_S = 40.0
IN_COLLECTIVE = "torch/distributed/distributed_c10d.py:5356 in barrier"
COMPUTES = "train.py:12 in load"
SLEEPS: Mapping[str, Any] = {"state": "S (sleeping)", "wchan": "hrtimer_nanosleep"}
STOPPED: Mapping[str, Any] = {"state": "T (stopped)"}


def view(rank: int, frame: str, entered: int, finished: int, process: Mapping[str, Any] = SLEEPS) -> RankView:
    groups = {"0": GroupState(entered, finished, "barrier")}
    if entered == 0:
        groups = {}
    return RankView(Scene(rank, [frame], process), groups, {"0": [0, 1, 2]})


def waits(rank: int, idle_s: float | None = 39.0, entered: int = 7, **more: Any) -> RankSample:
    """A rank that waits in its last collective since then. On a GPU it spins: it is never still."""
    return RankSample(view(rank, IN_COLLECTIVE, entered, entered - 1), idle_s, **more)


def absent(rank: int, entered: int = 6, idle_s: float = 0.0, frame: str = COMPUTES, **more: Any) -> RankSample:
    """A rank that computes in its own code, for which the others wait."""
    return RankSample(view(rank, frame, entered, entered), idle_s, **more)


def judged(*ranks: RankSample, all_ranks: bool = True) -> Hang | None:
    """What a first look says."""
    return HangClocks(LIMIT_S).judge(ranks, all_ranks, 1000.0)


def waited(*ranks: RankSample, all_ranks: bool = True) -> float | None:
    hang = judged(*ranks, all_ranks=all_ranks)
    if hang is None:
        return None
    return hang.waited_s


# Ranks wait in a collective.


def test_it_counts_from_the_moment_when_the_last_rank_that_did_come_entered() -> None:
    hang = judged(waits(0, 100.0), absent(1), waits(2, 39.0))
    assert hang is not None and (hang.waited_s, hang.limit_s, hang.is_over_limit) == (39.0, LIMIT_S, False)
    hang = judged(waits(0, 100.0), absent(1), waits(2, 40.0))
    assert hang is not None and hang.is_over_limit
    assert (hang.rank_to_end([0, 1, 2]), hang.reason_for(1)) == (1, "2 ranks wait for it in a collective")


@pytest.mark.parametrize(
    ("rank", "waited_s"),
    [
        (absent(1), 39.0),
        (absent(1, report_age_s=500.0), 39.0),
        (absent(1, report_age_s=3.0), 3.0),
        (absent(1, has_own_limit=True), None),
        (absent(1, frame="python3.12/pdb.py:300 in interaction"), None),
        (absent(1, frame="IPython/terminal/debugger.py:40 in cmdloop"), None),
        (RankSample(view(1, COMPUTES, 6, 6, {"state": "R (running)", "traced": True})), None),
        (RankSample(view(1, COMPUTES, 6, 6, STOPPED)), 39.0),
    ],
    ids=[
        *("computes", "reported long ago", "reports", "in a section with a limit of its own", "in pdb", "in ipdb"),
        *("under gdb or strace", "is stopped"),
    ],
)
def test_what_the_rank_that_does_not_come_does(rank: RankSample, waited_s: float | None) -> None:
    assert waited(waits(0), rank, waits(2)) == waited_s


def test_without_a_recorder_a_rank_that_holds_the_gil_and_computes_is_ended() -> None:
    """It gave no stack. Another node may have asked."""
    silent = RankSample(RankView(Scene(1, [], {"state": "R (running)", "silent": True}), iteration=3), 40.0)
    inside = [RankSample(replace(view(rank, IN_COLLECTIVE, 0, 0), iteration=3), 40.0) for rank in (0, 2)]
    for rank in (silent, of_record(json.loads(json.dumps(to_record(silent))))):
        hang = judged(*inside, rank)
        assert hang is not None and hang.is_over_limit and hang.finding is not None
        assert (hang.finding.kind, hang.rank_to_end([0, 1, 2])) == (HangKind.BEHIND, 1)


def test_what_the_waiting_ranks_report_or_have_open_is_no_matter() -> None:
    assert waited(waits(0, has_own_limit=True), absent(1), waits(2, report_age_s=39.0)) == 39.0


def test_a_collective_that_is_finished_sets_it_back() -> None:
    """A backward pass is one call without a stamp, and has many collectives."""
    clocks = HangClocks(LIMIT_S)
    ranks = [waits(0, 39.0, entered=7), absent(1, entered=6)]
    first = clocks.judge(ranks, True, 1000.0)
    again = clocks.judge(ranks, True, 1005.0)
    assert first is not None and again is not None and (first.waited_s, again.waited_s) == (39.0, 39.0)
    ranks = [waits(0, 60.0, entered=8), absent(1, entered=7)]
    third = clocks.judge(ranks, True, 1010.0)
    fourth = clocks.judge([waits(0, 65.0, entered=8), absent(1, entered=7)], True, 1015.0)
    assert third is not None and fourth is not None and (third.waited_s, fourth.waited_s) == (0.0, 5.0)
    clocks.reset()
    fresh = clocks.judge([waits(0, 39.0, entered=90), absent(1, entered=89)], True, 2000.0)
    assert fresh is not None and fresh.waited_s == 39.0, "what was finished between two standstills is no matter"


def test_one_that_is_finished_in_another_group_does_not() -> None:
    clocks = HangClocks(LIMIT_S)
    for finished, now in ((3, 1000.0), (4, 1010.0)):
        beside = {"other": GroupState(finished, finished)}
        busy = RankSample(replace(absent(1).view, groups={**absent(1).view.groups, **beside}))
        hang = clocks.judge([waits(0), busy], True, now)
        assert hang is not None and hang.waited_s == 39.0


@pytest.mark.parametrize(
    ("ranks", "limit_s"),
    [
        ([waits(0, entered=1), RankSample(view(1, COMPUTES, 0, 0))], 3600.0),
        ([waits(0, entered=2), absent(1, entered=1)], LIMIT_S),
        ([waits(0, entered=1), RankSample(replace(view(1, COMPUTES, 0, 0), iteration=0))], LIMIT_S),
    ],
    ids=["none is finished", "one is finished", "an iteration was reported"],
)
def test_the_limit_before_the_first_collective_is_an_hour(ranks: Sequence[RankSample], limit_s: float) -> None:
    hang = HangClocks(LIMIT_S).judge(ranks, True, 0.0)
    assert hang is not None and hang.limit_s == limit_s
    longer = HangClocks(5000.0).judge(ranks, True, 0.0)
    assert longer is not None and longer.limit_s == 5000.0


def test_a_job_that_is_stopped_as_a_whole_does_not_hang() -> None:
    stopped = [RankSample(view(rank, IN_COLLECTIVE, 7, 6, STOPPED), 500.0, still_s=500.0) for rank in range(3)]
    assert waited(*stopped) is None
    assert waited(RankSample(view(0, COMPUTES, 6, 6, STOPPED), 500.0, still_s=500.0)) is None


IN_PDB = absent(1, frame="python3.12/pdb.py:300 in interaction")


@pytest.mark.parametrize(
    "before",
    [
        (waits(0, 500.0), IN_PDB),
        tuple(RankSample(view(rank, COMPUTES, 6, 6, STOPPED), 500.0, still_s=500.0) for rank in range(2)),
    ],
    ids=["a rank was debugged", "the job was stopped"],
)
def test_after_a_debugger_and_a_stop_the_clock_begins_anew(before: Sequence[RankSample]) -> None:
    """The others have waited meanwhile; the rank goes on where it was, and needs its time for that."""
    clocks = HangClocks(LIMIT_S)
    assert clocks.judge(before, True, 1000.0) is None
    soon, later = (clocks.judge([waits(0, 500.0), absent(1)], True, now) for now in (1005.0, 1040.0))
    assert soon is not None and later is not None and (soon.waited_s, later.waited_s) == (5.0, LIMIT_S)
    clocks.reset()
    fresh = clocks.judge([waits(0), absent(1)], True, 1041.0)
    assert fresh is not None and fresh.waited_s == 39.0


def test_ranks_that_have_returned_are_not_waited_for_when_nobody_waits() -> None:
    gone = RankSample(replace(view(1, "", 6, 6), ended=True), None)
    assert waited(RankSample(view(0, COMPUTES, 6, 6), 39.0, still_s=38.0), gone) == 38.0
    hang = judged(waits(0), gone)
    assert hang is not None and (hang.rank_to_end([0]), hang.reason_for(0)) == (
        0,
        "it waits in a collective for rank 1",
    )


# The ranks of other nodes.


def test_a_rank_of_another_node() -> None:
    hang = judged(waits(0), absent(5), waits(2, 45.0))
    assert hang is not None and (hang.rank_to_end([0, 2]), hang.waited_s) == (0, 39.0)
    assert hang.reason_for(0) == "it waits in a collective for rank 5"
    assert hang.rank_to_end([7]) is None


def test_where_other_nodes_do_not_answer_only_a_rank_that_surely_is_missing_hangs() -> None:
    assert waited(waits(0), waits(2), all_ranks=False) is None
    assert waited(waits(0), absent(1), waits(2), all_ranks=False) == 39.0


def test_there_and_back() -> None:
    for state in (waits(0), absent(1, report_age_s=3.5, has_own_limit=True), absent(2, still_s=4.0)):
        back = of_record(json.loads(json.dumps(to_record(state))))
        assert replace(back, view=state.view) == state
        assert (back.view.scene.frames, back.view.groups) == (state.view.scene.frames, state.view.groups)
    traced = RankSample(view(1, COMPUTES, 6, 6, {"state": "R", "traced": True}))
    assert of_record(to_record(traced)).is_debugged
    for wrong in ({}, None, to_record(waits(0)) | {"idle_s": "x"}, to_record(waits(0)) | {"still_s": None}):
        with pytest.raises(ProtocolError):
            of_record(wrong)


# Nobody is named.


def test_all_are_in_one_collective_that_does_not_end() -> None:
    hang = judged(waits(0), waits(1), waits(2, 50.0))
    assert hang is not None and hang.finding is not None and hang.finding.kind is HangKind.TRANSPORT
    assert (hang.waited_s, hang.rank_to_end([2])) == (39.0, 2)
    assert hang.reason_for(2) == "all ranks are in one collective that does not end"


def test_where_nobody_is_named_the_whole_job_must_stand_still() -> None:
    """By their stacks both wait; the recorder, which would say in what, is not there."""
    ranks = [RankSample(view(rank, IN_COLLECTIVE, 0, 0), 500.0, still_s=40.0) for rank in range(2)]
    assert waited(*ranks) == 40.0
    assert waited(ranks[0], replace(ranks[1], still_s=3.0)) == 3.0
    assert waited(ranks[0], replace(ranks[1], has_own_limit=True)) is None


# Nobody waits.


def alone(rank: int = 0, idle_s: float | None = 500.0, **more: Any) -> RankSample:
    return RankSample(view(rank, COMPUTES, 6, 6), idle_s, **{"still_s": 39.0, **more})


@pytest.mark.parametrize(
    ("rank", "waited_s"),
    [
        (alone(), 39.0),
        (alone(still_s=500.0, idle_s=39.0), 39.0),
        (alone(still_s=0.0), None),
        (alone(idle_s=0.0), None),
        (alone(idle_s=None), None),
        (alone(report_age_s=2.0), 2.0),
        (alone(has_own_limit=True), None),
        (RankSample(view(0, "python3.12/bdb.py:90 in trace", 6, 6), 500.0, still_s=500.0), None),
    ],
    ids=[
        *("still", "idle since", "active", "runs Python", "without stamps", "reports", "in its own section"),
        "in a debugger",
    ],
)
def test_a_rank_that_stands_still_alone(rank: RankSample, waited_s: float | None) -> None:
    assert waited(rank) == waited_s


def test_the_longest_standstill_counts() -> None:
    hang = judged(alone(0), alone(1, still_s=45.0), alone(2, still_s=1.0))
    assert hang is not None and (hang.rank, hang.waited_s, hang.rank_to_end([0, 1, 2])) == (1, 45.0, 1)
    assert hang.reason_for(1) == "its main thread runs no Python, and it uses no CPU time and reads and writes nothing"


def test_one_that_waits_for_others_is_not_alone() -> None:
    """It stands still as well, and longer than the rank is awaited."""
    assert waited(waits(0, 39.0, still_s=500.0), absent(1, report_age_s=1.0)) == 1.0
