"""The connection against a real socket: what is lost is counted and said again, nothing blocks, nothing is raised."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_client.rank.monitoring.link import Link
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.descriptor import socket_copy
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.messages import (
    Attach,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Sections,
    StacksAsked,
    Welcome,
)
from tests.client.fake_monitor import FakeMonitor
from tests.descriptors import connected_to
from tests.patience import until


class Training:
    """A source whose state is one open section."""

    def __init__(self) -> None:
        self.iteration = 7
        self.forgotten = False

    def state(self) -> list[tuple[Message, int]]:
        return [(Hello(os.getpid(), attached=True), 1), (Sections((("step", 5),), self.iteration), 6)]

    def disconnect(self) -> None:
        self.forgotten = True


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeMonitor]:
    fake = FakeMonitor(tmp_path / "m0")
    yield fake
    fake.close()


def beat(link: Link) -> bool:
    return link.send(codec.heartbeat(next(link.sequence), time.monotonic_ns()))


def beat_until_back(link: Link) -> None:
    until(lambda: beat(link), "the connection comes back by itself")


def attend_until(link: Link, condition: Callable[[], object], what: str) -> None:
    """Does the watchdog's turns."""

    def turn() -> object:
        link.poll(0.01)
        return condition()

    until(turn, what)


def test_the_first_message_is_a_hello(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    assert link.reconnect()
    assert beat(link)
    fake.wait_for(Heartbeat)
    assert fake.kinds() == ["Hello", "Heartbeat"]
    assert fake.messages(Hello) == [Hello(os.getpid())]
    assert [one.sequence for one in fake.received] == [1, 2]


def test_without_a_listener_sends_are_lost_and_counted(tmp_path: Path) -> None:
    link = Link(tmp_path / "nobody", own=True)
    assert [beat(link) for _ in range(5)] == [False] * 5
    assert (link.losses, link.dirty) == (5, True)


def test_attempts_are_rare_in_the_hot_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def refuse(path: Path) -> None:
        attempts.append(path)
        raise ConnectionRefusedError

    monkeypatch.setattr("ft_client.rank.monitoring.link.channel.connect", refuse)
    link = Link(tmp_path / "nobody", own=True)
    started = time.monotonic()
    for _ in range(2000):
        beat(link)
    assert 1 <= len(attempts) <= 1 + (time.monotonic() - started) / 0.1


def test_a_full_queue_loses_messages_and_the_connection_stays(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    fake.pause()
    link.reconnect()
    while beat(link):
        pass
    assert not beat(link)
    assert (link.losses, link.dirty) == (2, True)
    fake.resume()
    until(lambda: beat(link), "there is room again")
    assert fake.connections == 1


def test_a_lost_connection_comes_back_with_the_whole_state(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    training = Training()
    link.set_source(training)
    link.reconnect()
    fake.wait_for(Sections)
    fake.drop()
    beat_until_back(link)
    fake.wait_for(Sections, 2)
    fake.wait_for(Heartbeat)
    assert fake.kinds()[-3:] == ["Hello", "Sections", "Heartbeat"]
    assert fake.messages(Hello)[1].attached
    assert fake.received[-2].sent_ns == 6
    assert not link.dirty


def test_a_message_that_must_arrive_waits_for_room(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    fake.pause()
    link.reconnect()
    while beat(link):
        pass
    assert not link.post(Refused("x"), 1, timeout_s=0.02)
    assert link.stale
    fake.resume()
    assert link.post(Refused("y"), 1, timeout_s=10.0)
    assert fake.wait_for(Refused) == [Refused("y")]


def test_a_script_that_made_sigpipe_deadly_survives_a_dead_monitor(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    link.reconnect()
    fake.wait_for(Hello)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        fake.drop()
        beat_until_back(link)
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_the_watchdogs_turn_makes_a_lost_connection_anew(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    link.reconnect()
    fake.wait_for(Hello)
    fake.drop()
    attend_until(link, lambda: len(fake.messages(Hello)) == 2, "connected again")


def test_a_welcome_brings_the_settings(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    link.reconnect()
    link.post(Attach(), 1)
    attend_until(link, lambda: link.settings, "settings")
    assert link.settings == fake.settings


@pytest.mark.parametrize("own", [False, True])
def test_a_refused_child_gives_up_and_a_refused_rank_does_not(fake: FakeMonitor, own: bool) -> None:
    fake.refusal = "the rank is connected already"
    link = Link(fake.path, own)
    link.reconnect()
    attend_until(link, lambda: link.refused, "the refusal")
    if own:
        attend_until(link, lambda: fake.connections > 2, "another attempt")
        return
    attend_until(link, lambda: link.closed, "giving up")
    assert not link.reconnect()
    assert link.ask(Attach(), 1, 10.0) is None


def test_a_script_that_closes_every_descriptor_is_no_error(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    link.reconnect()
    fake.wait_for(Hello)
    os.close(connected_to(fake.path))
    beat_until_back(link)
    fake.wait_for(Heartbeat)


def test_bytes_that_are_no_message_are_counted(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    link.reconnect()
    fake.wait_for(Hello)
    for data in (b"x", b"\xff" * 40, codec.encode(Welcome({"safety_factor": "wrong"}, 0), 1, 1)):
        fake.say(data)
    attend_until(link, lambda: link.losses == 3, "three losses")
    assert link.settings is None


def test_a_forked_child_lets_go_and_the_parents_connection_lives(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    training = Training()
    link.set_source(training)
    link.reconnect()
    fake.wait_for(Hello)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            link.close_in_child()
            os._exit(0 if training.forgotten and not beat(link) and not link.reconnect() else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert beat(link)
    fake.wait_for(Heartbeat)
    assert fake.connections == 1


def test_the_descriptor_is_out_of_the_scripts_way_and_not_inherited(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    link.reconnect()
    ours = [descriptor for descriptor in proc.own_descriptors() if leads_to(descriptor, fake.path)]
    assert ours
    assert min(ours) >= 200
    assert not any(os.get_inheritable(one) for one in ours)


def leads_to(descriptor: int, path: Path) -> bool:
    """Whether it is the end of a connection whose other end listens at `path`. Another thread may have closed it."""
    with contextlib.suppress(OSError), socket_copy(descriptor) as end:
        return end.family == socket.AF_UNIX and str(end.getpeername()).endswith(path.name)
    return False


def test_a_question_for_stacks_is_left_to_the_watchdog(fake: FakeMonitor) -> None:
    link = Link(fake.path, own=True)
    assert link.reconnect() and not link.stacks_asked
    fake.wait_for(Hello)
    fake.say(codec.encode(StacksAsked(), 1, 1))
    attend_until(link, lambda: link.stacks_asked, "the question")
    link.close_in_child()
