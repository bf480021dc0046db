"""Ranks of one host, each a thread here: how they meet, and what they exchange."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ft_client import meeting
from ft_client.meeting import meet
from ft_client.same_host import PeerGone, SameHost
from tests.client.stranger import holding, needs_another_user

LONG_S = 120.0


class Ranks:
    """What torch's collectives are for ranks that meet, and a thread for each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=LONG_S)
        self._said: list[Any] = [None] * size
        self._pool = ThreadPoolExecutor(size)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said

    def meet(self, wait_s: float = LONG_S, name_for: Callable[[int, float], float] = lambda _, name: name) -> Any:
        """By rank, its connections. `name_for`: what a rank hears of rank 0's name."""

        def one(rank: int) -> SameHost | None:
            def from_rank0(name: float) -> float:
                return name_for(rank, float(self.gather(rank, name)[0]))

            return meet(rank, self.size, wait_s, from_rank0, lambda is_here: all(self.gather(rank, is_here)))

        return [found.result() for found in self.start(one)]

    def start(self, call: Callable[[int], Any]) -> list[Future[Any]]:
        return [self._pool.submit(call, rank) for rank in range(self.size)]

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(getattr(request, "param", 3))
    yield made
    made.close()


def errors(calls: list[Future[Any]]) -> list[BaseException | None]:
    return [call.exception(LONG_S) for call in calls]


@pytest.mark.parametrize("ranks", [2, 3, 8], indirect=True)
@pytest.mark.parametrize("large", [0, 1_000_000])
def test_all_get_what_rank_0_makes_of_all_by_rank(ranks: Ranks, large: int) -> None:
    hosts = ranks.meet()

    def ask(rank: int) -> list[bytes]:
        said = (b"%d" % rank, b"", b"x" * large)
        return [hosts[rank].exchange(f"question {n}", one, b"|".join) for n, one in enumerate(said)]

    expected = [b"|".join([b"%d" % rank for rank in range(ranks.size)])]
    expected += [b"|" * (ranks.size - 1), b"|".join([b"x" * large] * ranks.size)]
    assert [call.result(LONG_S) for call in ranks.start(ask)] == [expected] * ranks.size


def test_ranks_that_are_out_of_step(ranks: Ranks) -> None:
    hosts = ranks.meet()
    first, *others = errors(ranks.start(lambda rank: hosts[rank].exchange(f"question {rank // 2}", b"", b"".join)))
    assert isinstance(first, RuntimeError)
    assert "rank 2 asks for question 1, this rank for question 0" in str(first)
    assert all(isinstance(error, ConnectionError) for error in others)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_nobody_waits_for_a_rank_that_is_gone(ranks: Ranks, gone: int) -> None:
    hosts = ranks.meet()

    def ask(rank: int) -> bytes:
        if rank == gone:
            hosts[rank].close()
            return b""
        return bytes(hosts[rank].exchange("it", b"", b"".join))

    for rank, error in enumerate(errors(ranks.start(ask))):
        assert rank == gone or (isinstance(error, ConnectionError) and "Connection closed by peer" in str(error))


def test_who_waits_is_freed_from_another_thread_and_so_are_the_others(ranks: Ranks) -> None:
    hosts = ranks.meet()
    waiting = ranks.start(lambda rank: rank == 1 or hosts[rank].exchange("it", b"", b"".join))
    hosts[2].cut()
    assert [isinstance(error, ConnectionError) for error in errors(waiting)] == [True, False, True]
    with pytest.raises(ConnectionError):
        hosts[2].exchange("it", b"", b"".join)


def test_nobody_waits_for_the_others_either_once_a_rank_has_asked_and_is_gone(ranks: Ranks) -> None:
    hosts = ranks.meet()
    hosts[2]._send(b"it\0")
    hosts[2].close()
    first, *_ = errors(ranks.start(lambda rank: rank or hosts[rank].exchange("it", b"", b"".join)))
    assert isinstance(first, PeerGone) and "rank 2" in str(first)


@pytest.mark.parametrize("said", [b"\1\0\0\0xx", b"\3\0\0\0it\0" * 2, b"\1\0\0\0\xff"])
def test_garbage_frees_all(ranks: Ranks, said: bytes) -> None:
    hosts = ranks.meet()
    hosts[1]._peers[0].send(said)
    first, *_ = errors(ranks.start(lambda rank: rank == 1 or hosts[rank].exchange("it", b"", b"".join)))
    assert isinstance(first, RuntimeError) and "rank 1" in str(first)


def test_a_rank_that_never_asks(ranks: Ranks) -> None:
    hosts = ranks.meet(wait_s=0.2)
    late, _, freed = errors(ranks.start(lambda rank: rank == 1 or hosts[rank].exchange("it", b"", b"".join)))
    assert isinstance(late, TimeoutError) and "Timed out waiting 200ms for recv operation with rank 1" in str(late)
    assert isinstance(freed, OSError)


def test_who_has_never_said_all_is_late_too() -> None:
    here, there = socket.socketpair()
    with here, there:
        enough = threading.Event()

        def trickle() -> None:
            there.send(b"\xff\xff\0\0")
            for _ in range(100):
                if enough.wait(0.05):
                    return
                there.send(b"x")
            there.close()

        talking = threading.Thread(target=trickle)
        talking.start()
        with pytest.raises(TimeoutError):
            SameHost({1: here}, 0.3, spins=False).exchange("it", b"", b"".join)
        enough.set()
        talking.join()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_a_signals_handler_raises_is_not_taken_for_a_lost_rank(ranks: Ranks) -> None:
    hosts = ranks.meet()

    def interrupt(*_: object) -> None:
        raise TimeoutError("enough")

    def strike(main: int) -> None:
        select.select(list(hosts[0]._peers.values()), [], [], LONG_S)  # it says more than is heard meanwhile
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        striking = threading.Thread(target=strike, args=(threading.get_ident(),))
        striking.start()
        with pytest.raises(TimeoutError, match="enough"):
            hosts[1].exchange("it", b"x" * 10_000_000, b"".join)
        striking.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(
        errors(ranks.start(lambda rank: rank or hosts[0].exchange("it", b"", b"".join)))[0], ConnectionError
    )


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_who_lets_sigpipe_end_it_outlives_a_rank_that_is_gone(ranks: Ranks) -> None:
    gone, left = ranks.meet()
    gone.close()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with contextlib.suppress(ConnectionError):
            left.exchange("it", b"", b"".join)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_the_answer_raises_frees_all(ranks: Ranks) -> None:
    hosts = ranks.meet()

    def fail(_: list[bytes]) -> bytes:
        raise KeyboardInterrupt

    first, *others = errors(ranks.start(lambda rank: hosts[rank].exchange("it", b"", fail)))
    assert isinstance(first, KeyboardInterrupt)
    assert all(isinstance(error, ConnectionError) for error in others)


@pytest.mark.parametrize("away", [1, 2])
def test_none_meet_unless_all_can(ranks: Ranks, away: int) -> None:
    assert ranks.meet(name_for=lambda rank, name: name + 1 if rank == away else name) == [None] * 3


@pytest.mark.parametrize("files", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_none_meet_where_one_may_open_too_few_files(ranks: Ranks, files: int) -> None:
    """Of the listener, the connection and its other end."""
    held = [os.dup(0) for _ in range(files + 1)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1], hard))
    try:
        assert ranks.meet() == [None] * 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_a_signals_handler_raises_is_not_taken_for_a_socket_that_cannot_be_had() -> None:
    def interrupted(_: socket.socket) -> None:
        raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        meeting._prepared(interrupted)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_nobody_waits_for_a_rank_that_fails_to_hear_that_all_have_met(ranks: Ranks) -> None:
    """Though its exception, with all that it refers to, is kept."""

    def one(rank: int) -> None:
        answers = []

        def on_all(is_here: bool) -> bool:
            answers.append(all(ranks.gather(rank, is_here)))
            if rank == 1 and len(answers) == 2:
                raise RuntimeError("the group is gone")
            return answers[-1]

        host = meet(rank, 2, LONG_S / 20, lambda name: float(ranks.gather(rank, name)[0]), on_all)
        assert host is not None
        host.exchange("it", b"", b"".join)

    left, failed = errors(ranks.start(one))
    assert str(failed) == "the group is gone"
    assert isinstance(left, ConnectionError)


def test_none_meet_where_rank_0_cannot_listen(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = meeting._address(1.0)
    monkeypatch.setattr(meeting.os, "urandom", bytes)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(taken)
        assert ranks.meet() == [None] * 3


@pytest.mark.parametrize("said", [b"", b"\1", meeting._HELLO.pack(0), meeting._HELLO.pack(3)])
def test_a_connection_of_somebody_else_is_none_of_a_rank(ranks: Ranks, said: bytes) -> None:
    strangers = []

    def intrude(rank: int, name: float) -> float:
        if rank == 0:
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[0].connect(meeting._address(name))
            strangers[0].send(said)
        return name

    hosts = ranks.meet(name_for=intrude)
    assert None not in hosts
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_fork_lets_go_of_its_parents_connections(ranks: Ranks) -> None:
    hosts = ranks.meet()
    child = os.fork()
    if child == 0:
        for host in hosts:
            host.close()
        os._exit(0)
    os.waitpid(child, 0)
    asked = ranks.start(lambda rank: hosts[rank].exchange("it", b"%d" % rank, b"".join))
    assert [call.result(LONG_S) for call in asked] == [b"012"] * 3


def test_a_default_timeout_of_sockets_is_not_theirs(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    socket.setdefaulttimeout(0.01)
    try:
        hosts = ranks.meet()
        assert all(peer.gettimeout() is None for host in hosts for peer in host._peers.values())
    finally:
        socket.setdefaulttimeout(None)


@needs_another_user
def test_a_listener_of_another_user_is_not_rank_0() -> None:
    told: list[bool] = []
    with holding("ft_client-7", "8"):
        assert meet(1, 2, LONG_S, lambda name: 7.0, lambda whether: told.append(whether) or whether) is None
    assert told[-1] is False
