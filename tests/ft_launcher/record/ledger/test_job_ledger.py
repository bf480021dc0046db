"""The ledger of a job: each second in one category, whatever happens and in whatever order."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ft_launcher.record.ledger.account import Category, add, category_of, durations_as_json, durations_of
from ft_launcher.record.ledger.job_ledger import JobLedger
from rank_monitor.contract.wire.rank_times import UNKNOWN, Durations, Outside, RankTimes
from rank_monitor.time_ledger import TimeLedger

WALL = 1_700_000_000.0


def ns(second: float) -> int:
    return round(second * 1e9)


class Rank:
    """A rank whose ledger a monitor keeps; it is watched from its first message on."""

    def __init__(self, at: float) -> None:
        self.ledger = TimeLedger()
        self.ledger.begin(ns(at))
        self.ledger.attached(ns(at))
        self.at = at

    def spend(self, section: str, length: float) -> None:
        self.ledger.sections({section: ns(self.at)}, ns(self.at), -1)
        self.at += length
        self.ledger.sections({}, ns(self.at), -1)

    def train(self, first: int, *lengths: float) -> None:
        """Steps, each reported when it is done."""
        for number, length in enumerate(lengths):
            self.spend("step", length)
            self.ledger.iteration(first + number, ns(self.at))

    def times(self, at: float) -> RankTimes:
        return self.ledger.times(ns(at))


def healthy(ledger: JobLedger, rank: Rank, cycle: int, start: float, end: float, stop: float) -> None:
    """A cycle from the start of its ranks on, that ends without a fault."""
    ledger.ranks_started(cycle, start)
    ledger.cycle_over(end)
    ledger.rank_times(cycle, rank.times(end))
    ledger.stopped(stop)


def rounded(seconds: Any) -> dict[str, float]:
    return {name: round(spent_s, 6) for name, spent_s in seconds.items() if round(spent_s, 6)}


def adds_up(ledger: JobLedger, now: float, begin: float) -> None:
    found = ledger.account(now)
    assert math.isclose(found.wall_s, now - begin, abs_tol=1e-6)
    assert math.isclose(sum(found.seconds.values()), now - begin, abs_tol=1e-6)
    assert min(found.seconds.values()) >= 0
    assert 0 <= found.goodput_saved <= found.goodput + 1e-9 <= 1 + 2e-9


def begun() -> JobLedger:
    """A job whose ranks are about to start at second 10."""
    ledger = JobLedger(0.0, WALL)
    ledger.begins(Category.HEALTH, 2.0)
    ledger.begins(Category.RENDEZVOUS, 5.0)
    ledger.begins(Category.LAUNCH, 9.0)
    return ledger


BEFORE = {"launch": 3, "health": 3, "rendezvous": 4}


@pytest.mark.parametrize(
    ("section", "category"),
    [
        ("step", "step"),
        ("checkpointing", "checkpoint_save"),
        ("save", "checkpoint_save"),
        ("restore", "checkpoint_load"),
        ("dataloader", "data"),
        ("validation", "evaluation"),
        ("init", "setup"),
        ("logging", "custom:logging"),
        ("launch", "custom:launch"),
    ],
)
def test_sections_have_categories(section: str, category: str) -> None:
    assert category_of(section) == category


def test_a_healthy_job() -> None:
    ledger, rank = begun(), Rank(11)
    rank.spend("setup", 4)
    rank.train(0, 8, 2, 2)
    rank.spend("checkpointing", 3)
    rank.train(3, 2)
    healthy(ledger, rank, 0, 10, 33, 34)
    found = ledger.account(36)
    expected = {"step": 8, "warmup": 6, "setup": 4, "checkpoint_save": 3, "launch": 4, "unknown": 1, "stop": 3}
    assert rounded(found.seconds) == BEFORE | expected
    assert found.wall_s == pytest.approx(36)
    assert found.goodput == pytest.approx(8 / 36)
    assert found.goodput_saved == pytest.approx(6 / 36)
    assert found.steps == 4
    part = ledger.last
    assert part is not None and (part.cycle, part.saved, part.resumed, part.recovery) == (0, 2, -1, {})
    assert (part.since, part.until) == (WALL, WALL + 34)


def crashed() -> JobLedger:
    """A job that saved after step 2 and crashed in step 5, then goes on from step 3."""
    ledger, rank = begun(), Rank(11)
    rank.train(0, 2, 2, 2)
    rank.spend("save", 1)
    rank.train(3, 2, 2)
    ledger.ranks_started(0, 10)
    rank.ledger.sections({"step": ns(22)}, ns(22), -1)
    ledger.cycle_over(23.5)
    ledger.rank_times(0, rank.times(24))
    ledger.failed(23)
    ledger.stopped(25)
    ledger.begins(Category.BACKOFF, 25)
    ledger.begins(Category.HEALTH, 27)
    ledger.begins(Category.RENDEZVOUS, 30)
    ledger.begins(Category.LAUNCH, 34)
    return ledger


def test_a_crash_makes_steps_lost_progress_once_the_next_cycle_has_resumed() -> None:
    ledger = crashed()
    before = {"step": 10, "checkpoint_save": 1, "lost_progress": 1, "detection": 0.5, "stop": 1.5}
    assert rounded(ledger.account(34).seconds) == {
        **before,
        **{"launch": 4, "health": 6, "rendezvous": 8, "backoff": 2},
    }
    rank = Rank(36)
    rank.train(3, 5, 2, 2)
    healthy(ledger, rank, 1, 35, 45, 46)
    found = ledger.account(46)
    assert found.seconds["lost_progress"] == pytest.approx(4 + 1)  # steps 3 and 4, and the one that was cut off
    assert found.seconds["step"] == pytest.approx(6 + 6)
    assert found.seconds["warmup"] == pytest.approx(3)
    assert found.goodput == pytest.approx(12 / 46)
    assert found.goodput_saved == pytest.approx(6 / 46)
    adds_up(ledger, 46, 0)
    part = ledger.last
    assert part is not None
    assert rounded(part.recovery) == {
        **{"detection": 0.5, "stop": 1.5, "backoff": 2, "health": 3},
        **{"rendezvous": 4, "start": 2, "first_step": 5},
    }


def test_a_later_cycle_that_resumes_even_earlier_takes_more_away() -> None:
    ledger = crashed()
    for cycle, begin in ((1, 35.0), (2, 60.0)):
        rank = Rank(begin)
        rank.train(3 - 2 * (cycle - 1), 2, 2)
        ledger.ranks_started(cycle, begin)
        ledger.cycle_over(rank.at)
        ledger.rank_times(cycle, rank.times(rank.at))
        ledger.failed(None)
        ledger.stopped(rank.at)
    # Cycle 2 resumed after step 0: all of cycle 1 and steps 1 to 4 of cycle 0 are lost.
    assert ledger.account(70).seconds["step"] == pytest.approx(2 + 0 + 4)
    adds_up(ledger, 70, 0)


def test_a_cycle_that_never_trained_takes_nothing_away() -> None:
    ledger = crashed()
    ledger.ranks_started(1, 35)
    ledger.cycle_over(40)
    ledger.rank_times(1, Rank(36).times(40))
    ledger.failed(None)
    ledger.stopped(41)
    assert ledger.account(41).seconds["step"] == pytest.approx(10)


def test_without_iterations_a_restart_resumes_at_the_checkpoint() -> None:
    ledger, rank = begun(), Rank(10)
    for _ in range(3):
        rank.spend("step", 2)
    rank.spend("checkpoint", 1)
    rank.spend("step", 2)
    ledger.ranks_started(0, 10)
    ledger.rank_times(0, rank.times(rank.at))
    ledger.failed(rank.at)
    ledger.stopped(rank.at)
    again = Rank(rank.at)
    again.spend("step", 2)
    healthy(ledger, again, 1, rank.at, again.at, again.at)
    assert rounded(ledger.account(again.at).seconds)["lost_progress"] == 2
    adds_up(ledger, again.at, 0)


def test_a_hang_is_detection_from_the_last_sign_of_progress_on() -> None:
    ledger, rank = begun(), Rank(10)
    rank.train(0, 2, 2)
    ledger.ranks_started(0, 10)
    rank.ledger.sections({"step": ns(14)}, ns(14), -1)
    ledger.cycle_over(75)
    ledger.rank_times(0, rank.times(75))
    ledger.failed(15)  # of another rank; this one waited for it in its step
    ledger.stopped(77)
    expected = {"step": 4, "lost_progress": 1, "detection": 60, "stop": 2}
    assert rounded(ledger.account(77).seconds) == BEFORE | expected


def test_a_fault_that_is_older_than_the_last_progress_began_then() -> None:
    ledger, rank = begun(), Rank(10)
    rank.train(0, 2, 2)
    ledger.ranks_started(0, 10)
    ledger.cycle_over(20)
    ledger.rank_times(0, rank.times(20))
    ledger.failed(-5.0)
    ledger.stopped(21)
    assert rounded(ledger.account(21).seconds) == BEFORE | {"step": 4, "detection": 6, "stop": 1}


def test_ranks_that_save_after_the_signal_are_not_stopping() -> None:
    ledger, rank = begun(), Rank(10)
    rank.train(0, 2, 2)
    rank.spend("checkpointing", 30)
    ledger.ranks_started(0, 10)
    ledger.cycle_over(13)
    ledger.rank_times(0, rank.times(rank.at))
    ledger.stopped(45)
    assert rounded(ledger.account(45).seconds) == BEFORE | {"step": 4, "checkpoint_save": 30, "stop": 1}


def test_no_rank_was_watched() -> None:
    ledger = begun()
    ledger.ranks_started(0, 10)
    ledger.cycle_over(50)
    ledger.failed(48)
    ledger.stopped(51)
    assert rounded(ledger.account(51).seconds) == BEFORE | {"unknown": 38, "detection": 2, "stop": 1}
    assert ledger.account(51).goodput == 0


def test_heartbeats_alone_tell_nothing_of_the_time() -> None:
    ledger = begun()
    healthy(ledger, Rank(11), 0, 10, 50, 50)
    assert rounded(ledger.account(50).seconds) == BEFORE | {"launch": 4, "unknown": 39}


def test_steps_by_reported_iterations() -> None:
    ledger, rank = begun(), Rank(10)
    for number, at in enumerate((15, 17, 19, 21)):
        rank.ledger.iteration(number, ns(at))
    healthy(ledger, rank, 0, 10, 21, 21)
    assert rounded(ledger.account(21).seconds) == BEFORE | {"step": 8, "warmup": 3}


def test_a_pause_is_excluded() -> None:
    ledger, rank = begun(), Rank(10)
    rank.ledger.sections({"step": ns(10)}, ns(10), -1)
    rank.ledger.pause(ns(12), ns(112))
    healthy(ledger, rank, 0, 10, 113, 113)
    assert rounded(ledger.account(113).seconds) == BEFORE | {"step": 3, "excluded": 100}


def test_growing_is_membership_until_the_ranks_run_again() -> None:
    ledger, rank = begun(), Rank(10)
    rank.train(0, 2, 2)
    ledger.ranks_started(0, 10)
    ledger.cycle_over(14)
    ledger.rank_times(0, rank.times(14))
    ledger.membership_changes()
    ledger.stopped(16)
    ledger.begins(Category.HEALTH, 16)
    ledger.begins(Category.RENDEZVOUS, 17)
    ledger.begins(Category.LAUNCH, 20)
    again = Rank(22)
    again.train(2, 2, 2)
    healthy(ledger, again, 1, 21, 26, 27)
    found = ledger.account(27)
    assert rounded(found.seconds) == BEFORE | {"step": 8, "membership": 7, "launch": 4, "stop": 1}
    assert ledger.last is not None and ledger.last.recovery == {}


def test_the_wait_that_the_coordinator_decided_is_backoff() -> None:
    ledger = JobLedger(0.0, WALL)
    ledger.begins(Category.RENDEZVOUS, 1)
    ledger.begins(Category.LAUNCH, 11)
    ledger.waited(8)
    assert rounded(ledger.account(12).seconds) == {"launch": 2, "rendezvous": 2, "backoff": 8}
    ledger.waited(80)
    assert rounded(ledger.account(12).seconds) == {"launch": 2, "backoff": 10}


def test_a_ledger_that_comes_after_the_end_of_its_cycle_corrects_it() -> None:
    ledger, rank = begun(), Rank(10)
    rank.train(0, 2, 2)
    ledger.ranks_started(0, 10)
    ledger.stopped(14)
    assert rounded(ledger.account(14).seconds) == BEFORE | {"unknown": 4}
    ledger.begins(Category.HEALTH, 15)
    ledger.rank_times(0, rank.times(14))
    ledger.rank_times(7, Rank(3).times(9))
    assert rounded(ledger.account(15).seconds) == BEFORE | {"step": 4, "stop": 1}
    assert ledger.durations(15)["step"].count == 2
    adds_up(ledger, 15, 0)


def test_the_durations_of_a_cycle_are_those_of_its_sections() -> None:
    ledger, rank = begun(), Rank(10)
    rank.train(0, 2, 1)
    rank.spend("save", 3)
    healthy(ledger, rank, 0, 10, 16, 17)
    assert ledger.last is not None
    of_first = ledger.last
    assert {name: (known.count, known.longest_ns) for name, known in of_first.durations.items()} == {
        "step": (2, ns(2)),
        "save": (1, ns(3)),
    }
    healthy(ledger, Rank(20), 1, 20, 30, 31)
    assert ledger.last is not None and ledger.last.durations == {}
    assert ledger.present(32).durations == {}


def test_durations_in_the_journal() -> None:
    known = Durations()
    for length in (0.5, 0.25, 2.0, 0.25):
        known.add(ns(length))
    line = {"durations": durations_as_json({"step": known})}
    assert line["durations"]["step"] == {"count": 4, "first_s": 0.5, "max_s": 2.0, "buckets": [[28, 2], [34, 1]]}
    read = durations_of(json.loads(json.dumps(line)))["step"]
    assert (read.count, read.first_ns, read.longest_ns, read.buckets) == (4, ns(0.5), ns(2), {28: 2, 34: 1})
    assert read.quantile_ns(0.5) == known.quantile_ns(0.5) == ns(0.25)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": True},
        {"count": 0},
        {"count": 1 << 60},
        {"first_s": -1},
        {"first_s": None},
        {"max_s": math.nan},
        {"max_s": 1e300},
        {"max_s": "1"},
        {"buckets": {}},
        {"buckets": [[1, 1]] * 65},
        {"buckets": [[64, 1]]},
        {"buckets": [[-1, 1]]},
        {"buckets": [[1, -1]]},
        {"buckets": [[1, 1, 1]]},
        {"buckets": [[1, 0.5]]},
        {"buckets": [1]},
    ],
    ids=str,
)
def test_durations_that_do_not_fit_are_left_out(wrong: dict[str, Any]) -> None:
    good = {"count": 2, "first_s": 1.0, "max_s": 2.0, "buckets": [[34, 1]]}
    assert durations_of({"durations": {"good": good, "wrong": good | wrong, "text": "x"}}).keys() == {"good"}


@pytest.mark.parametrize("wrong", [None, [], {str(number): {} for number in range(67)}], ids=["none", "list", "many"])
def test_durations_that_are_none(wrong: object) -> None:
    assert durations_of({"durations": wrong}) == {}


def test_the_account_of_a_cycle_that_runs() -> None:
    ledger, rank = begun(), Rank(10)
    ledger.ranks_started(0, 10)
    rank.train(0, 2, 2)
    ledger.rank_times(0, rank.times(14))
    assert rounded(ledger.account(14).seconds) == BEFORE | {"step": 4}
    assert ledger.present(14).cycle == 0
    rank.ledger.sections({"evaluation": ns(15)}, ns(15), -1)
    ledger.rank_times(0, rank.times(16))
    assert rounded(ledger.account(19).seconds) == BEFORE | {"step": 4, "unknown": 1, "evaluation": 4}
    adds_up(ledger, 20, 0)


def test_categories_of_sections_are_bounded() -> None:
    seconds: dict[str, float] = {}
    for number in range(500):
        add(seconds, f"custom:{number}", 1.0)
    assert len(seconds) == 65 and sum(seconds.values()) == 500


def test_hundreds_of_cycles_lose_no_time() -> None:
    ledger = JobLedger(0.0, WALL)
    for cycle in range(600):
        rank = Rank(10.0 * cycle + 1)
        rank.train(cycle, 2, 2)
        ledger.ranks_started(cycle, rank.at - 4)
        ledger.cycle_over(rank.at)
        ledger.rank_times(cycle, rank.times(rank.at))
        ledger.failed(None)
        ledger.stopped(rank.at)
    adds_up(ledger, 6000, 0)
    assert ledger.account(6000).seconds["step"] == pytest.approx(600 * 2 + 2)


# Whatever happens.

MOMENTS = st.floats(-5, 200)
DURATIONS = st.builds(
    Durations,
    count=st.integers(0, 9),
    exclusive_ns=st.integers(0, ns(100)),
    first_ns=st.integers(0, ns(50)),
    least_ns=st.integers(0, ns(50)),
    most_ns=st.integers(0, ns(50)),
    sum_ns=st.integers(0, ns(90)),
)
PLACES = st.sampled_from([place.value for place in Outside])
SECTIONS = st.sampled_from(["step", "checkpointing", "data", "eval", "other"])


@st.composite
def ledgers(draw: st.DrawFn) -> RankTimes:
    """A ledger of any contents, which need not fit together."""
    since, at, now = sorted(draw(st.tuples(MOMENTS, MOMENTS, MOMENTS)))
    is_section = draw(st.booleans())
    points = draw(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, ns(90))), max_size=6))
    return RankTimes(
        since_ns=max(0, ns(since)),
        at_ns=max(0, ns(at)),
        now_ns=max(0, ns(now)),
        tail=draw(SECTIONS if is_section else PLACES),
        tail_is_section=is_section,
        pause=tuple(sorted(draw(st.tuples(st.integers(0, ns(200)), st.integers(0, ns(200)))))),
        step=draw(DURATIONS),
        by_iterations=draw(st.booleans()),
        sections=draw(st.dictionaries(SECTIONS, DURATIONS, max_size=3)),
        outside=draw(st.dictionaries(PLACES, st.integers(0, ns(60)), max_size=4)),
        resumed=draw(st.integers(UNKNOWN, 30)),
        first_done_ns=draw(st.integers(0, ns(100))),
        first_step_ns=draw(st.integers(0, ns(100))),
        lost_ns=draw(st.integers(0, ns(60))),
        points=sorted(dict(points).items()),
        saved_ns=draw(st.integers(-1, ns(100))),
    )


EVENTS = st.one_of(
    st.tuples(st.just("begins"), st.sampled_from(list(Category)), MOMENTS),
    st.tuples(st.just("ranks_started"), st.integers(0, 3), MOMENTS),
    st.tuples(st.just("rank_times"), st.integers(0, 3), ledgers()),
    st.tuples(st.just("cycle_over"), MOMENTS),
    st.tuples(st.just("failed"), st.one_of(st.none(), MOMENTS)),
    st.tuples(st.just("membership_changes")),
    st.tuples(st.just("stopped"), MOMENTS),
    st.tuples(st.just("waited"), st.floats(-5, 50)),
)


@given(st.lists(EVENTS, max_size=30), MOMENTS)
@example([("ranks_started", 0, 0.0), ("cycle_over", 1.0), ("begins", Category.STEP, 0.0)], 0.0)
def test_the_categories_add_up_to_the_time_that_has_passed(events: list[Any], now: float) -> None:
    ledger = JobLedger(0.0, WALL)
    latest = 0.0
    for name, *arguments in events:
        getattr(ledger, name)(*arguments)
        if name in ("begins", "ranks_started", "cycle_over", "stopped"):
            latest = max(latest, arguments[-1])
    passed = max(now, latest, ledger.present(0.0).until - WALL)
    found = ledger.account(passed)
    assert math.isclose(found.wall_s, passed, abs_tol=1e-6)
    assert min(found.seconds.values()) >= 0
    assert 0 <= found.goodput_saved <= found.goodput + 1e-9 <= 1 + 2e-9


def test_lost_steps_are_counted_as_soon_as_the_next_cycle_says_where_it_resumed() -> None:
    ledger, rank = begun(), Rank(11)
    rank.train(0, *[1.0] * 10)
    ledger.ranks_started(0, 10)
    ledger.cycle_over(22)
    ledger.failed(22.0)
    ledger.rank_times(0, rank.times(22))
    ledger.stopped(22)
    ledger.begins(Category.HEALTH, 23)
    ledger.ranks_started(1, 24)
    assert ledger.steps_lost(25) == 0, "not known yet"
    again = Rank(25)
    again.train(4, 1.0)
    ledger.rank_times(1, again.times(27))
    assert ledger.steps_lost(27) == 6
    ledger.stopped(28)
    assert ledger.steps_lost(29) == 6


def test_lost_steps_of_hundreds_of_cycles() -> None:
    """Each does two steps, of which the next does one again; the sums of old cycles are kept."""
    ledger = begun()
    for cycle in range(600):
        start = 10.0 + 10 * cycle
        rank = Rank(start + 1)
        rank.train(cycle, 1.0, 1.0)
        healthy(ledger, rank, cycle, start, start + 4, start + 5)
        ledger.begins(Category.RENDEZVOUS, start + 6)
    assert ledger.steps_lost(10_000) == 599
