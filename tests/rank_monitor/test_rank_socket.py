"""The rank's connection: read as messages come, left unread while heartbeats come steadily, and its end always seen."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rank_monitor.contract.wire.messages import Heartbeat, Hello, Message, Sections
from rank_monitor.hang_detector import DetectorState
from rank_monitor.limits import MAX_UNREAD_NS, WatchLimits
from rank_monitor.loop import Loop
from rank_monitor.rank_socket import RankSocket, batch_delay_ns
from tests.patience import until
from tests.rank_monitor.node import PATIENCE_S, bytes_of
from tests.rank_monitor.timeline import STARTED_S, Timeline, limited

BETWEEN_S = 0.01


class Listening:
    """A rank's socket in this process, and what it heard."""

    def __init__(self) -> None:
        self.beats: list[int] = []
        self.heard: list[Message] = []
        self.losses = 0
        self.max_delay_ns = MAX_UNREAD_NS
        self.loop = Loop()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(b"")
        self.listener.listen()
        self.listener.setblocking(False)
        self.socket = RankSocket(
            self.loop,
            self.listener,
            on_heartbeat=self.beats.append,
            on_message=lambda received, _: self.heard.append(received.message),
            on_hello=lambda _: None,
            on_lost=self._lose,
            on_refused=pytest.fail,
            max_delay_ns=lambda: self.max_delay_ns,
        )
        self.socket.begin(0)
        self.rank = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.rank.connect(self.listener.getsockname())
        self.rank.send(bytes_of(Hello(os.getpid())))
        until(self._greeted, "it was not greeted")

    def _lose(self) -> None:
        self.losses += 1

    def _greeted(self) -> bool:
        self.loop.wait(0)
        return bool(self.heard)

    def beat(self) -> bool:
        """Sends one heartbeat a moment after the last; whether the next messages lie unread."""
        time.sleep(BETWEEN_S)
        self.rank.send(bytes_of(Heartbeat()))
        self.loop.wait(0)
        return self.socket.unread_until_ns is not None


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    yield made
    made.socket.drop()
    made.loop.close()
    made.listener.close()
    made.rank.close()


def test_steady_heartbeats_are_read_together(listening: Listening) -> None:
    until(listening.beat, "it never rested")
    sent = len(listening.beats)
    listening.rank.send(bytes_of(Heartbeat()))
    listening.rank.send(bytes_of(Sections((("step", 1),))))
    listening.loop.wait(0)
    assert len(listening.beats) == sent
    listening.socket.drain()
    assert len(listening.beats) == sent + 1
    assert isinstance(listening.heard[-1], Sections)


def test_when_nothing_came_meanwhile_the_next_message_is_read_as_it_comes(listening: Listening) -> None:
    until(listening.beat, "it never rested")
    listening.socket.drain()
    assert listening.socket.unread_until_ns is None
    listening.rank.send(bytes_of(Sections(())))
    listening.loop.wait(PATIENCE_S)
    assert listening.heard[-1] == Sections(())


def test_without_patience_every_message_is_read_as_it_comes(listening: Listening) -> None:
    listening.max_delay_ns = 0
    assert not any(listening.beat() for _ in range(10))
    assert len(listening.beats) == 10


def test_the_end_of_a_connection_is_seen_while_it_is_left_unread(listening: Listening) -> None:
    until(listening.beat, "it never rested")
    listening.rank.send(bytes_of(Sections(())))
    listening.rank.close()

    def lost() -> bool:
        listening.loop.wait(PATIENCE_S)
        return listening.losses == 1

    until(lost, "the end was not seen")
    assert listening.heard[-1] == Sections(())
    assert listening.socket.unread_until_ns is None


# How long a rank may be left unread, with the limits that cut it short.

MS = 1_000_000


@pytest.mark.parametrize(
    ("beats", "passed_ms", "longest_ms", "expected_ms"),
    [
        pytest.param(0, 250, 250, 0, id="nothing came"),
        pytest.param(1, 100, 250, 250, id="ten a second"),
        pytest.param(3, 250, 250, 250, id="ten a second, read together"),
        pytest.param(1, 250, 250, 0, id="so slow that no two would be read together"),
        pytest.param(1, 1, 250, 16, id="a thousand a second: few wait unread"),
        pytest.param(500, 250, 250, 8, id="came faster than they were expected"),
        pytest.param(1, 0.2, 250, 0, id="a burst"),
        pytest.param(1, 10, 50, 50, id="a short limit"),
        pytest.param(1, 100, 50, 0, id="a limit as short as the interval"),
        pytest.param(1, 100, 0, 0, id="an alarm"),
    ],
)
def test_batch_delay(beats: int, passed_ms: float, longest_ms: int, expected_ms: int) -> None:
    assert batch_delay_ns(beats, round(passed_ms * MS), longest_ms * MS) == expected_ms * MS


@pytest.mark.parametrize(
    ("limits", "expected_ms"),
    [
        ({}, 250),
        ({"rank_heartbeat_timeout": 60.0}, 250),
        ({"rank_heartbeat_timeout": 60.0, "rank_section_timeouts": {"step": 0.4, "setup": None}}, 100),
        ({"initial_rank_heartbeat_timeout": 0.2}, 50),
    ],
)
def test_no_limit_is_missed_by_a_message_that_lies_unread(limits: dict[str, Any], expected_ms: int) -> None:
    assert WatchLimits.configured(limited(**limits)).max_delay_ns == expected_ms * MS


def test_nothing_lies_unread_during_an_alarm() -> None:
    line = Timeline(limited(initial_rank_heartbeat_timeout=10.0))
    line.attach()
    assert line.detector.max_delay_ns() > 0
    line.until(STARTED_S + 9.95)
    assert line.detector.state is DetectorState.SUSPECT
    assert line.detector.max_delay_ns() == 0
