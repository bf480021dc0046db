"""The connection between two nodes: who is let in, and that no frame is taken that was changed, repeated or moved."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rank_monitor.contract.wire.proven_link import MAX_RECORD, LinkError, ProvenLink
from tests.patience import patient

SECRET, OTHER_SECRET = b"0123456789abcdef", b"0123456789abcdeX"
GREETING, PROOF = 73, 32
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Pair]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


def soon() -> float:
    return time.monotonic() + patient(20)


def greet(connection: socket.socket, connects: bool, secret: bytes | None = None, job: str = "job") -> ProvenLink | str:
    """Returns the link, or why there is none. Closes the connection where there is none, as callers do."""
    try:
        return ProvenLink(connection, job, secret, connects, soon())
    except LinkError as problem:
        connection.close()
        return str(problem)


def both(first: Callable[[], ProvenLink | str], second: Callable[[], ProvenLink | str]) -> list[ProvenLink | str]:
    """Returns what two ends come to that greet each other."""
    found: list[ProvenLink | str] = ["", ""]

    def other() -> None:
        found[1] = second()

    thread = threading.Thread(target=other)
    thread.start()
    found[0] = first()
    thread.join(patient(60))
    return found


def linked(ends: Pair, secret: bytes | None = SECRET) -> tuple[ProvenLink, ProvenLink]:
    first, second = both(lambda: greet(ends[0], True, secret), lambda: greet(ends[1], False, secret))
    assert isinstance(first, ProvenLink), first
    assert isinstance(second, ProvenLink), second
    return first, second


@pytest.mark.parametrize("secret", [SECRET, None])
def test_frames_arrive_in_both_directions(ends: Pair, secret: bytes | None) -> None:
    first, second = linked(ends, secret)
    for number in range(3):
        first.send(b"to the second %d" % number, 5, soon())
        ends[0].sendall(b"bytes")
        assert second.receive(5, soon()) == (b"to the second %d" % number, 5)
        assert ends[1].recv(5, socket.MSG_WAITALL) == b"bytes"
        second.send(b"", 0, soon())
        assert first.receive(0, soon()) == (b"", 0)


def test_nodes_with_two_secrets_refuse_each_other(ends: Pair) -> None:
    connects, accepts = both(lambda: greet(ends[0], True, SECRET), lambda: greet(ends[1], False, OTHER_SECRET))
    assert accepts == "the other node has another secret in --ft-job-secret-file"
    assert isinstance(connects, str)


def test_a_node_with_a_secret_and_one_without_refuse_each_other(ends: Pair) -> None:
    connects, accepts = both(lambda: greet(ends[0], True, SECRET), lambda: greet(ends[1], False, None))
    assert connects == "this node has --ft-job-secret-file, and the other one has not"
    assert accepts == "the other node has --ft-job-secret-file, and this one has not"


def test_nodes_of_two_jobs_refuse_each_other(ends: Pair) -> None:
    found = both(lambda: greet(ends[0], True, SECRET, "one"), lambda: greet(ends[1], False, SECRET, "two"))
    assert found == ["the other node is of another job"] * 2


def test_who_only_connects_gets_no_proof(ends: Pair) -> None:
    ends[0].sendall(b"ftnode\x00\x01\x01")
    ends[0].shutdown(socket.SHUT_WR)
    assert greet(ends[1], False, SECRET) == "the other node has closed the connection"
    assert len(ends[0].recv(1000, socket.MSG_WAITALL)) == GREETING


@pytest.mark.parametrize("connects", [True, False])
def test_an_end_that_gives_back_what_it_is_sent_is_refused(ends: Pair, connects: bool) -> None:
    """No end takes its own proof for that of the other, nor its own greeting."""

    def echo() -> str:
        while data := ends[0].recv(1000):
            ends[0].sendall(data)
        return ""

    refused = both(lambda: greet(ends[1], connects, SECRET), echo)[0]
    assert refused == "the other end gives back what it is sent"


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n" + b" " * GREETING, b"\xff" * 1000, bytes(GREETING)])
def test_what_speaks_another_protocol_is_refused(ends: Pair, sent: bytes) -> None:
    ends[0].sendall(sent)
    assert "no node of a job" in str(greet(ends[1], False, SECRET))


def test_the_proof_of_an_earlier_connection_is_of_no_use(ends: Pair) -> None:
    """Who has recorded all that a node sent once cannot connect with it."""
    recorded = bytearray()
    near, far = socket.socketpair()
    with near, far:

        def record() -> ProvenLink | str:
            greeting = near.recv(GREETING, socket.MSG_WAITALL)
            ends[0].sendall(greeting)
            near.sendall(ends[0].recv(GREETING, socket.MSG_WAITALL))
            proof = near.recv(PROOF, socket.MSG_WAITALL)
            ends[0].sendall(proof)
            near.sendall(ends[0].recv(PROOF, socket.MSG_WAITALL))
            recorded.extend(greeting + proof)
            return ""

        def serve() -> ProvenLink | str:
            return both(lambda: greet(ends[1], False, SECRET), record)[0]

        assert all(isinstance(link, ProvenLink) for link in both(lambda: greet(far, True, SECRET), serve))
    again, node = socket.socketpair()
    with again, node:
        again.sendall(recorded)
        assert "another secret" in str(greet(node, False, SECRET))


def test_a_byte_that_was_changed_on_the_way_is_found(ends: Pair) -> None:
    """Each byte of head, record and seal."""
    record = b"record"
    for place in range(12 + len(record) + 32):
        near, far = socket.socketpair()
        with near, far:
            first, second = linked((near, far))
            first.send(record, 7, soon())
            frame = bytearray(far.recv(1000))
            frame[place] ^= 1
            near.sendall(frame)
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkError):
                second.receive(1 << 62, soon())


def test_a_frame_that_is_repeated_or_left_out_is_found(ends: Pair) -> None:
    first, second = linked(ends)
    first.send(b"one", 0, soon())
    frame = ends[1].recv(1000)
    ends[0].sendall(frame * 2)
    assert second.receive(0, soon()) == (b"one", 0)
    with pytest.raises(LinkError, match="changed on the way"):
        second.receive(0, soon())


def test_a_frame_that_comes_back_to_its_sender_is_found(ends: Pair) -> None:
    first, _second = linked(ends)
    first.send(b"one", 0, soon())
    ends[1].sendall(ends[1].recv(1000))
    with pytest.raises(LinkError, match="changed on the way"):
        first.receive(0, soon())


def test_sizes_are_bounded(ends: Pair) -> None:
    first, second = linked(ends)
    first.send(b"x" * MAX_RECORD, 10, soon())
    assert second.receive(10, soon()) == (b"x" * MAX_RECORD, 10)
    first.send(b"", 11, soon())
    with pytest.raises(LinkError, match="sends 11 bytes, and 10 is the most"):
        second.receive(10, soon())
    ends[0].sendall(b"\xff" * 12)
    with pytest.raises(LinkError, match="a record of 4294967295 bytes"):
        second.receive(10, soon())


def test_half_a_frame_is_none(ends: Pair) -> None:
    first, second = linked(ends)
    first.send(b"record", 0, soon())
    ends[0].sendall(ends[1].recv(1000)[:-1])
    ends[0].close()
    with pytest.raises(LinkError, match="has closed the connection"):
        second.receive(0, soon())


def test_an_end_that_says_nothing_or_takes_nothing_is_given_up(ends: Pair) -> None:
    first, second = linked(ends)
    with pytest.raises(LinkError, match="does not answer"):
        second.receive(0, time.monotonic() + 0.01)
    with pytest.raises(LinkError, match="takes nothing"):
        while True:
            first.send(b"x" * MAX_RECORD, 0, time.monotonic() + 0.01)
