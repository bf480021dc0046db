"""The time ledger of a rank: whose each moment is, what is counted, what a restart or a lost monitor costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.launcher_messages import CycleStart, Times
from rank_monitor.contract.wire.messages import Attach, Detach, Hello, IterationReached, Sections
from rank_monitor.contract.wire.rank_times import (
    BOUNDS_NS,
    BUCKETS,
    MAX_NAMES,
    MAX_POINTS,
    OTHERS,
    Durations,
    Outside,
    RankTimes,
    rank_times,
    time_until,
)
from rank_monitor.time_ledger import TimeLedger
from tests.rank_monitor.timeline import NO_LIMITS, ONE_OF_EACH, RANK_PID, STARTED_S, Timeline, limited, ns
from tests.restart_reports import report

T = STARTED_S


def watched() -> Timeline:
    """A rank that connects after 1 s and is watched after 3."""
    line = Timeline(NO_LIMITS)
    line.say(Hello(RANK_PID), T + 1)
    line.say(Attach(), T + 3)
    return line


def times(line: Timeline, at: float | None = None) -> RankTimes:
    """The ledger as the agent gets it."""
    line.until(line.now if at is None else at)
    found = rank_times(json.loads(json.dumps(line.detector.watch.ledger.times(ns(line.now)).json())))
    assert found.known_ns == found.at_ns - found.since_ns
    assert found.since_ns <= found.at_ns <= found.now_ns
    return found


def seconds(found: RankTimes) -> dict[str, float]:
    """What each part has got."""
    parts = found.outside | {name: section.exclusive_ns for name, section in found.sections.items()}
    return {name: spent / 1e9 for name, spent in (parts | {"step": found.step.exclusive_ns}).items() if spent}


def train(line: Timeline, since: float, steps: int, first: int = 0, length: float = 2.0) -> float:
    """Steps as `ft.steps` reports them, one after the other; returns when the last was done."""
    for number in range(steps):
        line.open("step", at=since)
        since += length
        line.open(at=since)
        line.say(IterationReached(first + number))
    return since


def test_each_moment_belongs_to_the_innermost_section() -> None:
    line = watched()
    line.open("setup", at=T + 4)
    line.open(at=T + 10)
    line.open("step", at=T + 11)
    line.open("step", "data", at=T + 12)
    line.open("step", at=T + 15)
    line.open(at=T + 16)
    line.open("checkpointing", at=T + 18)
    line.open(at=T + 23)
    found = times(line, T + 25)
    expected = {"starting": 2, "preparing": 2, "setup": 6, "step": 2, "data": 3, "between": 2, "checkpointing": 5}
    assert seconds(found) == expected
    assert (found.tail, found.tail_is_section) == (Outside.BETWEEN, False)
    assert (found.at_ns, found.now_ns) == (ns(T + 23), ns(T + 25))
    assert found.step.first_ns == ns(5) and found.step.count == 1
    assert found.sections["data"].first_ns == ns(3)


def test_a_report_that_is_read_late_counts_from_when_it_was_sent() -> None:
    line = watched()
    line.say(Sections((("step", ns(T + 4)),)), at=T + 20, sent=T + 4)
    line.say(Sections(()), at=T + 20, sent=T + 10)
    assert seconds(times(line)) == {"starting": 2, "preparing": 1, "step": 6}


def test_sections_that_overlap() -> None:
    """The one that was opened last has the time, also where it was opened within another that ends before it."""
    line = watched()
    line.open("a", at=T + 3)
    line.open("a", "b", at=T + 5)
    line.open("b", at=T + 6)
    line.open(at=T + 10)
    found = times(line)
    assert seconds(found) == {"starting": 2, "a": 2, "b": 5}
    assert found.sections["a"].first_ns == ns(3)


def test_the_first_occurrence_stands_apart() -> None:
    line = watched()
    at = T + 3.0
    for length in (30.0, 2.0, 4.0, 2.0):
        line.open("step", at=at)
        at += length
        line.open(at=at)
    step = times(line).step
    assert (step.count, step.first_ns, step.least_ns, step.most_ns, step.sum_ns) == (4, ns(30), ns(2), ns(4), ns(8))
    assert sum(step.buckets.values()) == 3


def test_steps_by_reported_iterations() -> None:
    """A training without sections `step`: what is outside of sections is time of its steps."""
    line = watched()
    line.say(IterationReached(10), T + 8)
    line.open("checkpointing", at=T + 9)
    line.open(at=T + 10)
    line.say(IterationReached(11), T + 12)
    line.say(IterationReached(13), T + 20)
    found = times(line)
    assert found.by_iterations
    assert seconds(found) == {"starting": 2, "preparing": 5, "between": 11, "checkpointing": 1}
    assert (found.step.count, found.step.first_ns, found.step.least_ns, found.step.most_ns) == (4, ns(5), ns(4), ns(4))
    assert found.resumed == 9
    assert found.points == [(9, 0), (10, ns(5)), (11, ns(8)), (13, ns(16))]
    assert (found.saved, found.saved_ns) == (10, ns(6))


def test_points_say_how_long_the_steps_until_an_iteration_took() -> None:
    line = watched()
    end = train(line, T + 4, 5, first=100)
    found = times(line, end)
    assert (found.resumed, found.iteration, found.progress_ns) == (99, 104, ns(end))
    assert found.first_done_ns == ns(T + 6)
    assert time_until(found.points, 102) == ns(6)
    assert time_until(found.points, 99) == time_until(found.points, 3) == 0
    assert time_until(found.points, 900) == ns(10)


def test_an_iteration_that_is_reported_before_its_step() -> None:
    line = watched()
    for number in range(3):
        line.say(IterationReached(7 + number), T + 4 + 3 * number)
        line.open("step", at=T + 5 + 3 * number)
        line.open(at=T + 7 + 3 * number)
    found = times(line)
    assert (found.resumed, found.points) == (7, [(7, 0), (8, ns(2)), (9, ns(4))])
    assert not found.by_iterations and found.step.count == 3


def test_an_iteration_that_comes_with_the_sections_as_from_megatron() -> None:
    line = watched()
    for number in range(3):
        line.say(Sections((("step", ns(T + 4 + 2 * number)),), 20 + number), T + 4 + 2 * number)
        line.say(Sections((), 20 + number), T + 6 + 2 * number)
    found = times(line)
    assert (found.resumed, found.points) == (20, [(20, 0), (21, ns(2)), (22, ns(4))])


def test_points_are_bounded_and_keep_both_ends() -> None:
    line = watched()
    train(line, T + 4, 3000, length=0.01)
    points = times(line).points
    assert MAX_POINTS // 2 <= len(points) <= MAX_POINTS
    assert points[0] == (-1, 0) and points[-1][0] == 2999
    assert time_until(points, 1500) == pytest.approx(ns(15.01), rel=0.01)


def test_a_count_that_begins_anew_without_a_restart_loses_nothing() -> None:
    line = watched()
    end = train(line, T + 4, 3)
    train(line, end, 3)
    found = times(line)
    assert (found.lost_ns, found.points) == (0, [(-1, ns(6)), (0, ns(8)), (1, ns(10)), (2, ns(12))])


def test_the_saved_step() -> None:
    line = watched()
    end = train(line, T + 4, 3)
    line.open("checkpointing", at=end)
    line.open(at=end + 1)
    train(line, end + 1, 2, first=3)
    found = times(line)
    assert (found.saved, found.saved_ns) == (2, ns(6))


# What is not the training's time.


def test_a_pause_of_the_machine_is_excluded() -> None:
    line = Timeline(limited(oversleep_slack=1.0))
    line.attach(T + 1)
    line.open("step", at=T + 2)
    line.sleep(T + 2.4)
    line.sleep(T + 102)
    line.open(at=T + 103)
    found = times(line)
    assert seconds(found) == {"step": pytest.approx(1.4), "excluded": pytest.approx(99.6), "preparing": 1}
    assert found.step.first_ns == pytest.approx(ns(1.4))


def test_a_pause_of_the_monitor_alone_is_not() -> None:
    """Its rank reported meanwhile; only what follows its last report before the end may have been a pause."""
    line = Timeline(limited(oversleep_slack=1.0))
    line.attach(T + 1)
    line.open("step", at=T + 2)
    line.sleep(T + 50)
    for second in range(3, 50, 2):
        line.say(Sections(()), sent=T + second)
        line.say(Sections((("step", ns(T + second + 1)),)), sent=T + second + 1)
    assert seconds(times(line)) == {"step": 24, "between": 23, "preparing": 1, "excluded": 1}


def test_a_pause_that_has_just_been_seen_is_told_apart_from_the_tail() -> None:
    line = Timeline(limited(oversleep_slack=1.0))
    line.attach(T + 1)
    line.open("step", at=T + 2)
    line.sleep(T + 50)
    found = times(line)
    assert found.tail == "step" and found.pause == (ns(T + 2), ns(T + 50))


def test_after_the_watch_ended_no_section_is_open() -> None:
    line = watched()
    line.open("step", at=T + 3)
    line.say(Detach(), T + 5)
    found = times(line, T + 9)
    assert seconds(found) == {"starting": 2, "step": 2}
    assert found.tail == Outside.BETWEEN


def test_what_follows_the_end_of_the_process_is_nobodys() -> None:
    line = watched()
    line.open("step", at=T + 3)
    line.until(T + 6)
    line.detector.on_exit(ns(T + 6))
    found = times(line, T + 60)
    assert (found.tail, found.now_ns) == ("step", ns(T + 6))


# Restarts in process.


def test_a_restart_in_process() -> None:
    line = watched()
    line.say(report("running"), T + 3)
    train(line, T + 4, 4)
    line.open("step", at=T + 12)
    line.say(report("finalizing"), T + 15)
    line.say(report("closing"), T + 16)
    line.say(report("running"), T + 18)
    train(line, T + 20, 2, first=2)
    found = times(line)
    expected = {"starting": 2, "preparing": 3, "step": 12, "stalled": 3, "finalizing": 1, "restarting": 2}
    assert seconds(found) == expected
    assert found.lost_ns == ns(4)  # steps 2 and 3
    assert found.points == [(-1, 0), (0, ns(2)), (1, ns(4)), (2, ns(6)), (3, ns(8))]
    assert found.resumed == -1


def test_what_a_wrapper_says_before_its_first_call_is_no_restart() -> None:
    line = Timeline(NO_LIMITS)
    line.say(Hello(RANK_PID), T + 1)
    line.say(report("closing"), T + 2)
    line.say(report("running"), T + 4)
    line.say(Attach(), T + 5)
    train(line, T + 6, 2)
    line.say(report("done"), T + 11)
    found = times(line)
    assert seconds(found) == {"starting": 4, "preparing": 1, "step": 4}
    assert (found.resumed, found.lost_ns) == (-1, 0)
    assert found.points == [(-1, 0), (0, ns(2)), (1, ns(4))]


def test_an_unfinished_step_before_a_restart_in_process_counts_as_lost() -> None:
    line = watched()
    line.say(report("running"), T + 3)
    end = train(line, T + 4, 2)
    line.open("step", at=end)
    line.open("step", "data", at=end + 1)
    line.say(report("finalizing"), end + 1)
    line.say(report("running"), end + 1)
    train(line, end + 1, 1, first=2)
    found = times(line)
    assert found.lost_ns == ns(1)
    assert found.points[-1] == (2, ns(6))


# Lost reports, lost monitors.


def test_a_report_that_was_lost_costs_no_time_and_counts_no_false_duration() -> None:
    line = watched()
    line.open("step", at=T + 3)
    line.say(Sections((("step", ns(T + 9)),)), T + 9)  # the end of the first was lost
    line.open(at=T + 10)
    found = times(line)
    assert seconds(found) == {"starting": 2, "step": 7}
    assert (found.step.count, found.step.first_ns) == (1, ns(1))


def successor(before: Timeline, at: float, **start: Any) -> Timeline:
    """Another monitor takes over with what the first one sent last."""
    sent = json.loads(json.dumps(before.detector.watch.ledger.times(ns(before.now)).json()))
    line = Timeline(NO_LIMITS, reconnect=True, attached=True, times=sent, **start)
    line.until(at)
    return line


def test_a_monitor_that_takes_over_goes_on_with_the_ledger() -> None:
    line = watched()
    train(line, T + 4, 3)
    line.open("step", at=T + 10)
    after = successor(line, T + 14)
    after.say(Hello(RANK_PID, attached=True, last_sign_ns=ns(T + 13), got_first_sign=True), T + 14)
    after.say(Sections((("step", ns(T + 13)),), 4), T + 14, sent=T + 13)
    after.open(at=T + 15)
    after.say(IterationReached(5))
    found = times(after)
    assert found.since_ns == ns(T + 1)
    assert seconds(found) == {"starting": 2, "preparing": 1, "step": 11}
    assert (found.step.count, found.step.most_ns) == (3 + 2 + 1, ns(2))
    assert (found.iteration, found.resumed) == (5, -1)


def test_a_restart_in_process_after_a_monitor_took_over_loses_no_more_than_it_must() -> None:
    line = watched()
    line.say(report("running"), T + 3)
    end = train(line, T + 4, 3)
    after = successor(line, end + 1)
    after.say(Hello(RANK_PID, attached=True, last_sign_ns=ns(end), got_first_sign=True), end + 1)
    after.say(report("running"), end + 1)
    after.say(Sections((), 2), end + 1)
    after.say(report("finalizing"), end + 2)
    after.say(report("closing"), end + 2)
    after.say(report("running"), end + 3)
    train(after, end + 3, 1, first=3)
    assert times(after).lost_ns == 0


def test_a_section_that_is_open_over_the_loss_of_a_monitor_keeps_its_duration() -> None:
    line = watched()
    line.open("checkpointing", at=T + 10)
    after = successor(line, T + 14)
    after.say(Hello(RANK_PID, attached=True, last_sign_ns=ns(T + 13), got_first_sign=True), T + 14)
    after.say(Sections((("checkpointing", ns(T + 10)),)), T + 14, sent=T + 13)
    after.open(at=T + 20)
    assert times(after).sections["checkpointing"].first_ns == ns(10)


@pytest.mark.parametrize("text", [{}, {"since_ns": 1}, RankTimes().json() | {"at_ns": True}])
def test_a_successor_begins_anew_with_a_copy_that_does_not_fit(text: dict[str, Any]) -> None:
    line = Timeline(NO_LIMITS, reconnect=True, times=text)
    line.attach(T + 1)
    assert times(line).since_ns == ns(T + 1)


# What is sent.


def test_the_largest_ledger_fits_into_a_message() -> None:
    ledger = TimeLedger()
    ledger.begin(1)
    at = 2**62
    for number in range(300):
        name = f"{number:02d}" + "\N{SNOWMAN}" * 10
        for bound in BOUNDS_NS:
            ledger.sections({name: at}, at, number)
            at += bound
            ledger.sections({}, at, number)
    ledger.sections({f"{number:02d}" + "\N{SNOWMAN}" * 10: at + number for number in range(64)}, at + 64, 301)
    found = ledger.times(at)
    assert len(found.sections) == MAX_NAMES + 1 and len(found.points) > MAX_POINTS // 2
    data = codec.encode(Times(1, 2**22, found.json()), 1, 1)
    assert len(data) < 44_000
    message = codec.decode(data).message
    assert isinstance(message, Times)
    again = rank_times(message.times)
    assert again.known_ns == found.known_ns
    assert replace(again, sections={}) == replace(found, sections={})
    start = CycleStart(1, 3, RANK_PID, 1, "", reconnect=True, times=found.json())
    assert codec.decode(codec.encode(start, 1, 1)).message == start


def test_a_name_that_is_too_long_counts_under_the_others() -> None:
    line = watched()
    line.open("x" * 65, at=T + 3)
    line.open(at=T + 5)
    assert seconds(times(line)) == {"starting": 2, OTHERS: 2}


WRONG: list[dict[str, Any]] = [
    {"extra": 1},
    {"since_ns": -3},
    {"since_ns": 1.5},
    {"since_ns": 2**63},
    {"tail": "x" * 65},
    {"tail": "nowhere"},
    {"attached": 1},
    {"step": [1, 2]},
    {"step": [0, 0, 0, 0, 0, 0, BUCKETS, 1]},
    {"step": [-1, 0, 0, 0, 0, 0]},
    {"sections": {"a": "b"}},
    {"sections": {str(number): [0] * 6 for number in range(MAX_NAMES + 2)}},
    {"outside": {"elsewhere": 1}},
    {"outside": {"between": -1}},
    {"open": {"step": None}},
    {"points": [1]},
    {"points": [1] * (2 * MAX_POINTS + 2)},
    {"pause": [1]},
    {"pause": "ab"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_what_is_no_ledger_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        rank_times(RankTimes().json() | wrong)


def test_histograms_add_up() -> None:
    one, other = Durations(exclusive_ns=5), Durations(exclusive_ns=6)
    for length in (ns(9), ns(1), ns(2)):
        one.add(length)
    for length in (ns(7), ns(3)):
        other.add(length)
    joint = one.merged(other)
    assert (joint.count, joint.exclusive_ns, joint.first_ns, joint.sum_ns) == (5, 11, ns(9), ns(13))
    assert (joint.least_ns, joint.most_ns, sum(joint.buckets.values())) == (ns(1), ns(7), 4)
    assert Durations().merged(one) == one == one.merged(Durations())


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_never_too_low_and_at_most_41_percent_too_high(lengths: list[int], share: float) -> None:
    known = Durations()
    for length in lengths:
        known.add(length)
    exact = sorted(lengths)[max(0, math.ceil(share * len(lengths)) - 1)]
    found = known.quantile_ns(share)
    assert known.longest_ns == max(lengths)
    assert found is not None and exact <= found <= known.longest_ns
    if BOUNDS_NS[0] < exact <= BOUNDS_NS[-1]:
        assert found <= exact * 1.4143


def test_there_is_no_quantile_without_a_histogram() -> None:
    assert Durations().quantile_ns(0.5) is None
    assert Durations(count=9, most_ns=5).quantile_ns(0.5) is None
    assert Durations(count=1, first_ns=5).quantile_ns(0.5) == 5


# Whatever happens.

PHASES = [report("running"), report("finalizing"), report("closing")]
EVENTS = st.one_of(
    st.tuples(st.just("say"), st.sampled_from([*ONE_OF_EACH, *PHASES, IterationReached(2)])),
    st.tuples(st.just("open"), st.lists(st.sampled_from(["step", "data", "checkpointing", "x"]), unique=True)),
    st.tuples(st.just("exit"), st.none()),
    st.tuples(st.just("sleep"), st.none()),
    st.tuples(st.just("replace"), st.none()),
    st.tuples(st.just("lost"), st.none()),
)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 40), EVENTS), max_size=40))
def test_the_parts_are_the_time_since_the_first_message(events: list[tuple[float, float, tuple[str, Any]]]) -> None:
    line = Timeline(limited(oversleep_slack=5.0))
    for wait_s, late_s, (kind, what) in events:
        at = line.now + wait_s
        if kind == "sleep":
            line.sleep(at)
        elif kind == "exit":
            line.until(at)
            line.detector.on_exit(ns(at))
        elif kind == "lost":
            line.lose(at)
        elif kind == "replace":
            line = successor(line, at)
        elif kind == "open":
            line.open(*what, at=at)
        else:
            line.say(what, at, sent=max(0.0, at - late_s))
        found = times(line)
        assert min(found.outside.values(), default=0) >= 0
        assert found.lost_ns <= max(found.step.exclusive_ns, sum(found.outside.values()))
        assert found.points == sorted(set(found.points))
