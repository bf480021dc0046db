"""Any order of sections, heartbeats and pauses: never a verdict while each deadline holds, always one when it does not.

The oracle is written down anew here: what is open since when, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.messages import Heartbeat, IterationReached, Message, Progress, Sections
from rank_monitor.hang_detector import DetectorState
from tests.rank_monitor.timeline import STARTED_S, Timeline, limited, ns, verdicts

MS = 1_000_000
SECTION_LIMITS = {"a": 3.0, "b": 5.0, "step": 8.0, "free": None}
LIMITS = limited(
    initial_rank_heartbeat_timeout=12.0,
    rank_heartbeat_timeout=6.0,
    rank_section_timeouts=SECTION_LIMITS,
    rank_out_of_section_timeout=4.0,
)
NAMES = st.sampled_from(sorted(SECTION_LIMITS))
ACTS = st.one_of(
    st.tuples(st.just("open"), NAMES),
    st.tuples(st.just("close"), NAMES),
    st.sampled_from([("beat", ""), ("iteration", ""), ("progress", "")]),
)
STORIES = st.lists(st.tuples(st.integers(0, 4000), ACTS), max_size=40)


@dataclass
class Oracle:
    """Moments in nanoseconds."""

    last_sign: int
    alive: bool = False
    open: dict[str, int] = field(default_factory=dict)
    closed: int = 0

    def deadlines(self) -> dict[str, int]:
        due = {"subsequent": self.last_sign + ns(6)} if self.alive else {"initial": self.last_sign + ns(12)}
        for name, since in self.open.items():
            if (limit := SECTION_LIMITS[name]) is not None:
                due[f"section:{name}"] = since + ns(limit)
        if not self.open:
            due["out_of_section"] = self.closed + ns(4)
        return due

    def act(self, act: tuple[str, str], now: int) -> Message:
        kind, name = act
        if kind == "progress":
            return Progress(now)
        self.last_sign = now
        if kind == "iteration":
            return IterationReached(1)
        self.alive = True
        if kind == "beat" or (kind == "close" and name not in self.open):
            return Heartbeat()
        if kind == "open":
            self.open.setdefault(name, now)
        else:
            del self.open[name]
        if not self.open:
            self.closed = now
        return Sections(tuple(self.open.items()))


def begin() -> tuple[Timeline, Oracle]:
    line = Timeline(LIMITS)
    line.attach()
    return line, Oracle(last_sign=ns(STARTED_S), closed=ns(STARTED_S))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(STORIES)
def test_a_verdict_exactly_when_the_first_deadline_is_over(story: list[tuple[int, tuple[str, str]]]) -> None:
    """Woken when it asks to be, the verdict comes at the nanosecond; and names a deadline that is over."""
    line, oracle = begin()
    now = ns(STARTED_S)
    for wait_ms, act in [*story, (60_000, ("beat", ""))]:
        then = now + wait_ms * MS
        due = oracle.deadlines()
        first = min(due.values())
        while (wake := line.detector.next_wake()) is not None and wake < min(then, first):
            assert verdicts(line.tick(wake)) == []
        if first < then:
            (verdict,) = verdicts(line.tick(first))
            assert due[verdict.limit] == first
            assert line.detector.state is DetectorState.CONDEMNED
            return
        now = then
        assert verdicts(line.detector.on_message(Received(oracle.act(act, now), 0, now), now)) == []
        assert line.detector.state in (DetectorState.WATCHED, DetectorState.SUSPECT)
    raise AssertionError("a silence of a minute passed every deadline")


@settings(deadline=None, max_examples=200, derandomize=True)
@given(STORIES, st.lists(st.integers(0, 900), min_size=1, max_size=10))
def test_woken_late_it_still_judges_each_deadline(story: list[tuple[int, tuple[str, str]]], late: list[int]) -> None:
    """Within the slack: no verdict before its deadline, one at the first waking after it."""
    line, oracle = begin()
    now, wakes = ns(STARTED_S), 0
    for wait_ms, act in [*story, (60_000, ("beat", ""))]:
        then = now + wait_ms * MS
        while (wake := line.detector.next_wake()) is not None:
            at = max(now, wake + late[wakes % len(late)] * MS)
            if at >= then:
                break
            wakes += 1
            now = at
            overdue = [limit for limit, moment in oracle.deadlines().items() if moment <= now]
            found = verdicts(line.tick(now))
            assert [verdict.limit in overdue for verdict in found] == [True] * bool(overdue)
            if found:
                return
        now = then
        line.detector.on_message(Received(oracle.act(act, now), 0, now), now)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(STORIES, st.lists(st.tuples(st.integers(0, 30), st.integers(1600, 100_000)), max_size=4))
def test_pauses_kill_nobody(story: list[tuple[int, tuple[str, str]]], pauses: list[tuple[int, int]]) -> None:
    """Rank and monitor stop together, any number of times: a verdict never comes before the time that was lived."""
    line, oracle = begin()
    lived = now = ns(STARTED_S)
    real = {lived: now}
    where = dict(pauses)
    for index, (wait_ms, act) in enumerate(story):
        then = now + wait_ms * MS
        while (wake := line.detector.next_wake()) is not None and wake <= then:
            at = max(wake, now)
            if verdicts(line.tick(at)):
                assert min(oracle.deadlines().values()) <= lived + at - now
                return
        lived, now = lived + wait_ms * MS, then
        if index in where:
            now += where[index] * MS
            assert verdicts(line.tick(now)) == []
        real[lived] = now
        message = oracle.act(act, lived)
        if isinstance(message, Sections):
            message = Sections(tuple((name, real[since]) for name, since in message.open))
        line.detector.on_message(Received(message, 0, now), now)
