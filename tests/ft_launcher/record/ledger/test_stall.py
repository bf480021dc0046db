"""When a training counts as one that makes no steps, and what its time is then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_launcher.record.ledger.job_ledger import JobLedger
from ft_launcher.record.ledger.stall import Stall, stall_of
from rank_monitor.contract.wire.rank_times import GAP_WINDOW
from rank_monitor.time_ledger import TimeLedger
from tests.ft_launcher.record.ledger.test_job_ledger import Rank, adds_up, begun, ns, rounded

NO_ITERATION = -1


def open_step(rank: Rank) -> None:
    rank.ledger.sections({"step": ns(rank.at)}, ns(rank.at), NO_ITERATION)


def stalled_at(rank: Rank) -> float:
    """The second at which the rank counts as stalled, seconds after the last step that it has done."""
    for tenth in range(1, 100_000):
        if stall_of(rank.times(rank.at + tenth / 10)) is not None:
            return tenth / 10 - 0.1
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("lengths", "limit_s"),
    [
        pytest.param([0.1] * 50, 5.0, id="5 s at least"),
        pytest.param([30.0] + [0.125] * 50, 5.0, id="the first step is no gap"),
        pytest.param([2.0] * 20, 20.0, id="10 medians"),
        pytest.param([0.1] * 20 + [8.0] + [0.1] * 20, 12.0, id="1.5 times the longest gap"),
        pytest.param([8.0] * 2 + [0.1] * 990, 12.0, id="the longest of 1,000 steps"),
        pytest.param([8.0] * 2 + [0.1] * (2 * GAP_WINDOW), 5.0, id="a longer one of long ago"),
    ],
)
def test_how_long_a_step_may_take(lengths: list[float], limit_s: float) -> None:
    rank = Rank(10)
    rank.train(0, *lengths)
    open_step(rank)
    usual_s = sorted(lengths)[len(lengths) // 2]
    # The usual step is read off a histogram, and is up to 41 % too high.
    assert stalled_at(rank) == pytest.approx(limit_s, abs=max(0.2, 0.41 * 10 * usual_s * (limit_s == 10 * usual_s)))


def test_what_is_said_of_it() -> None:
    assert Stall(90, 24.2, 0.178, 0).text == "no step for 24 s, 136 times the usual one"
    assert Stall(90, 2400.0, 0.2, 0).text == "no step for 2400 s, 12,000 times the usual one"


def trained() -> Rank:
    rank = Rank(10)
    rank.train(0, *[0.5] * 10)
    return rank


def test_a_rank_in_another_section_is_not_stalled() -> None:
    """And what it has spent there is not a time in which a step was awaited."""
    rank = trained()
    rank.ledger.sections({"checkpointing": ns(rank.at)}, ns(rank.at), NO_ITERATION)
    assert stall_of(rank.times(rank.at + 1000)) is None
    rank.at += 1000
    rank.ledger.sections({}, ns(rank.at), NO_ITERATION)
    assert stall_of(rank.times(rank.at + 4)) is None
    stall = stall_of(rank.times(rank.at + 11))
    assert stall is not None and (stall.steps, stall.waited_s) == (10, 11)


def test_outside_of_all_sections_a_step_is_awaited() -> None:
    rank = trained()
    assert stall_of(rank.times(rank.at + 20)) is not None


def test_before_the_first_step_nothing_is_usual() -> None:
    rank = Rank(10)
    assert stall_of(rank.times(5000)) is None
    open_step(rank)
    assert stall_of(rank.times(5000)) is None


def test_a_watch_that_was_ended_expects_no_step() -> None:
    rank = trained()
    rank.ledger.detached(ns(rank.at))
    assert stall_of(rank.times(rank.at + 5000)) is None
    rank.ledger.attached(ns(rank.at + 6000), anew=True)
    assert stall_of(rank.times(rank.at + 6004)) is None
    assert stall_of(rank.times(rank.at + 6020)) is not None


def test_a_rank_that_has_ended_is_not_stalled() -> None:
    """However long the others go on."""
    rank = trained()
    rank.ledger.exited(ns(rank.at + 1))
    assert stall_of(rank.times(rank.at + 5000)) is None


def test_a_pause_of_the_machine_is_no_stall() -> None:
    rank = trained()
    rank.ledger.pause(ns(rank.at + 1), ns(rank.at + 101))
    assert stall_of(rank.times(rank.at + 104)) is None
    stall = stall_of(rank.times(rank.at + 112))
    assert stall is not None and stall.waited_s == 12


def test_a_call_after_a_restart_in_process_has_time_to_set_up() -> None:
    rank = Rank(10)
    rank.ledger.called(ns(10))
    rank.train(0, *[0.5] * 10)
    rank.ledger.interrupted(ns(rank.at))
    rank.ledger.restarts(ns(rank.at))
    rank.ledger.called(ns(rank.at))
    assert stall_of(rank.times(rank.at + 1000)) is None, "it prepares"
    rank.at += 1000
    open_step(rank)
    assert stall_of(rank.times(rank.at + 4)) is None
    assert stall_of(rank.times(rank.at + 20)) is not None


def test_another_monitor_goes_on() -> None:
    rank = trained()
    open_step(rank)
    before = rank.times(rank.at + 3)
    rank.ledger = TimeLedger(before)
    stall = stall_of(rank.times(rank.at + 20))
    assert stall is not None and stall == stall_of(replace(before, now_ns=ns(rank.at + 20)))


def test_steps_that_are_printed_now_and_then() -> None:
    """Ten steps a line: the gap between two lines is what counts."""
    ledger = TimeLedger()
    for line in range(5):
        ledger.printed(10 * line, 10, 0, ns(20 + 10 * line), ns(10))
    assert stall_of(ledger.times(ns(60 + 14))) is None
    assert stall_of(ledger.times(ns(60 + 16))) is not None


# What its time is.


def stalled() -> tuple[JobLedger, Rank]:
    """Ten steps of 0.5 s from second 11 on, then none; the limit is 7.1 s: ten times a step, read off a histogram."""
    ledger, rank = begun(), Rank(11)
    rank.train(0, *[0.5] * 10)
    open_step(rank)
    ledger.ranks_started(0, 10)
    return ledger, rank


def test_an_open_step_counts_as_detection_at_once() -> None:
    ledger, rank = stalled()
    ledger.rank_times(0, rank.times(20))
    assert "detection" not in ledger.account(20).seconds and ledger.stall is None
    ledger.rank_times(0, rank.times(60))
    seconds = rounded(ledger.account(60).seconds)
    assert ledger.stall is not None
    assert seconds["detection"] + seconds["step"] == pytest.approx(49)
    assert 5 + 5 <= seconds["step"] <= 5 + 7.1
    assert rounded(ledger.account(90).seconds)["step"] == seconds["step"], "until the next ledger it is where it was"
    adds_up(ledger, 90, 0)


def test_a_ledger_of_long_ago_is_no_stall() -> None:
    """Its monitor has not answered since: the rank may have made steps."""
    ledger, rank = stalled()
    ledger.rank_times(0, rank.times(17))
    assert "detection" not in ledger.account(500).seconds and ledger.stall is None


def test_a_step_that_ends_after_all_is_one() -> None:
    ledger, rank = stalled()
    ledger.rank_times(0, rank.times(60))
    rank.at = 61
    rank.ledger.sections({}, ns(61), NO_ITERATION)
    ledger.rank_times(0, rank.times(61))
    assert "detection" not in ledger.account(61).seconds and ledger.stall is None


def test_the_end_of_a_stall_by_a_fault_that_began_late() -> None:
    """The process that was stopped is killed: what nobody had ended until then stays `detection`."""
    ledger, rank = stalled()
    ledger.cycle_over(60)
    ledger.failed(60.0)
    ledger.rank_times(0, rank.times(60))
    ledger.stopped(61)
    assert ledger.stall is None
    seconds = rounded(ledger.account(61).seconds)
    assert (seconds["step"], seconds["stop"]) == (5, 1)
    assert seconds["lost_progress"] + seconds["detection"] == pytest.approx(44)
    assert 5 <= seconds["lost_progress"] <= 7.1
