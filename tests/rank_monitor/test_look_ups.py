"""Whether a rank waits for a resolver, and how long its limits wait for the answer."""

from __future__ import annotations

import os
import socket

import pytest

from rank_monitor.contract.processes import proc
from rank_monitor.contract.wire.launcher_messages import HangOverdue
from rank_monitor.contract.wire.messages import Attach, Heartbeat, Hello, Progress, Sections
from rank_monitor.hang_detector import Action, Interrupt, Note
from rank_monitor.limits import HARD, SOFT, Deadline
from rank_monitor.look_ups import LookUps, has_socket_to_resolver, may_wait_in_poll
from tests.rank_monitor.timeline import RANK_PID, STARTED_S, Timeline, limited, ns, verdict_of, verdicts
from tests.restart_reports import report

T = STARTED_S
HEAD = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid timeout inode ref pointer drops"
)
TO_RESOLVER = "  51: 0100007F:9C41 3500007F:0035 01 00000000:00000000 00:00000000 00000000  1000        0 4711 2 0 0"
BOUND = "  52: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4712 2 0 0"
OVER_IPV6 = f"  53: {'0' * 24}01000000:9C42 {'0' * 24}01000000:0035 01 0:0 00:0 0 1000 0 4713 2 0 0"
TABLES = ["\n".join((HEAD, TO_RESOLVER, BOUND)), "\n".join((HEAD, OVER_IPV6))]


@pytest.mark.parametrize(
    ("waits_in", "may"),
    [("do_poll", True), ("poll_schedule_timeout.constprop.0", True), ("", True), ("futex_do_wait", False)],
    ids=["polls", "polls, as another kernel names it", "kernel is silent", "waits for a lock"],
)
def test_who_may_wait_in_poll(waits_in: str, may: bool) -> None:
    assert may_wait_in_poll(waits_in) == may


@pytest.mark.parametrize(
    ("inodes", "has"),
    [({"1", "4711"}, True), ({"4713"}, True), ({"1", "2"}, False), ({"4712"}, False), (set(), False)],
    ids=["over IPv4", "over IPv6", "another process's", "a resolver itself", "none"],
)
def test_who_has_a_socket_to_a_resolver(inodes: set[str], has: bool) -> None:
    assert has_socket_to_resolver(inodes, TABLES) == has


def test_tables_that_are_cut_off_or_missing_show_no_look_up() -> None:
    assert not has_socket_to_resolver({"4711"}, ["", HEAD, TO_RESOLVER[:60]])


def test_a_socket_of_this_process_is_found_in_the_tables_of_the_kernel() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("127.0.0.1", 53))  # of UDP: nothing is sent
        inodes = proc.sockets_of(os.getpid())
        assert has_socket_to_resolver(inodes, proc.udp_tables(os.getpid()))
        asking.connect(("127.0.0.1", 54))
        assert not has_socket_to_resolver(inodes, proc.udp_tables(os.getpid()))


LIMIT_S = 2.0
LOOK, ANSWER, SIGN = "a look sees a look-up", "a look sees none", "a sign of life"


@pytest.mark.parametrize(
    ("story", "spared"),
    [
        ([(2.0, ANSWER)], [False]),
        ([(2.0, LOOK), (12.0, LOOK), (61.9, LOOK), (62.0, LOOK)], [True, True, True, False]),
        ([(2.0, LOOK), (2.1, ANSWER), (4.1, ANSWER)], [True, True, False]),
        ([(2.0, LOOK), (5.0, ANSWER), (7.0, LOOK), (61.0, ANSWER), (63.0, ANSWER)], [True, True, True, True, False]),
        ([(2.0, LOOK), (5.0, ANSWER), (7.0, LOOK), (62.0, LOOK)], [True, True, True, False]),
        ([(2.0, LOOK), (2.1, ANSWER), (3.0, SIGN), (5.0, ANSWER)], [True, True, False]),
        ([(2.0, LOOK), (2.1, ANSWER), (3.0, SIGN), (5.0, LOOK), (64.9, LOOK)], [True, True, True, True]),
    ],
    ids=[
        "none",
        "never answered",
        "answered",
        "two in a row",
        "again and again",
        "a sign, a hang",
        "a sign, another one",
    ],
)
def test_how_long_a_limit_is_spared(story: list[tuple[float, str]], spared: list[bool]) -> None:
    look_ups, since_s, found = LookUps(), 0.0, []
    for at_s, what in story:
        if what == SIGN:
            since_s = at_s
            continue
        deadline = look_ups.postponed(Deadline(SOFT, LIMIT_S, ns(since_s), ns(since_s + LIMIT_S)))
        assert deadline.at_ns <= ns(at_s), "it is looked at when the deadline has passed"
        found.append(look_ups.postpone(deadline, what == LOOK, ns(at_s)))
    assert found == spared


def told(actions: list[Action]) -> int:
    return sum(isinstance(action, Note) and "waits for a resolver" in action.text for action in actions)


def test_a_section_waits_for_the_answer_and_then_has_its_limit_anew() -> None:
    line = Timeline(limited(rank_section_timeouts={"setup": 2.0}))
    line.attach()
    line.open("setup", at=T + 1)
    line.asks_resolver = True
    assert told(line.until(T + 13)) == 1, "once"
    line.asks_resolver = False
    assert verdict_of(line, T + 15.1) == ("section:setup", 14.1), "the next look sees the answer, 0.1 s later"


def test_a_look_up_without_end_is_a_hang() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 2)
    line.asks_resolver = True
    assert verdict_of(line, T + 72) == ("subsequent", 70.0)


def test_what_comes_after_the_answer_is_judged_as_ever() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 2)
    line.asks_resolver = True
    assert verdicts(line.until(T + 20)) == []
    line.asks_resolver = False
    line.say(Heartbeat(), T + 21)
    assert verdict_of(line, T + 31) == ("subsequent", 10.0)


def test_a_wrapper_is_not_asked_for_a_restart_before_the_answer() -> None:
    line = Timeline(limited())
    line.say(Hello(RANK_PID))
    line.say(report("running", 5.0, 9.0, 4.0), T + 1)
    line.say(Progress(ns(T + 1)))
    line.asks_resolver = True
    assert not [action for action in line.until(T + 40) if isinstance(action, Interrupt)]
    line.asks_resolver = False
    asked = [action.verdict for action in line.until(T + 46) if isinstance(action, Interrupt)]
    assert [verdict.limit for verdict in asked] == [SOFT]
    (verdict, *_) = [verdict for verdict in verdicts(line.until(T + 60)) if verdict.condemned]
    assert verdict.limit == HARD


def test_a_hang_that_the_launcher_found_is_ended_at_once() -> None:
    line = Timeline(limited(hang_timeout=40.0))
    line.say(Hello(RANK_PID))
    line.say(Attach())
    line.say(Sections((("step", ns(T)),)))
    line.asks_resolver = True
    line.say(HangOverdue(40.0, 41.0, "2 ranks wait for it"), T + 100)
    assert [verdict.limit for verdict in verdicts(line.until(T + 100))] == ["hang"]
