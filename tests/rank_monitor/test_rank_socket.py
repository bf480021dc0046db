"""The rank's connection: read as messages come, left unread while heartbeats come steadily, and its end always seen."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from rank_monitor.batch_delay import LONGEST_NS
from rank_monitor.contract.wire.messages import Heartbeat, Hello, Message, Sections
from rank_monitor.loop import Loop
from rank_monitor.rank_socket import RankSocket
from tests.rank_monitor.node import PATIENCE_S, bytes_of, until

BETWEEN_S = 0.01


class Listening:
    """A rank's socket in this process, and what it heard."""

    def __init__(self) -> None:
        self.beats: list[int] = []
        self.heard: list[Message] = []
        self.losses = 0
        self.longest_delay_ns = LONGEST_NS
        self.loop = Loop()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(b"")
        self.listener.listen()
        self.listener.setblocking(False)
        self.socket = RankSocket(
            self.loop,
            self.listener,
            self.beats.append,
            lambda received, _: self.heard.append(received.message),
            lambda _: None,
            self._lose,
            pytest.fail,
            lambda: self.longest_delay_ns,
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
    listening.longest_delay_ns = 0
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
