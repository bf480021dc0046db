"""Parcels: sealed, whole, with the descriptors that belong to them."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
from collections.abc import Iterator

import pytest

from rank_monitor.contract.wire import sealed_pickle


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected ends that do not block."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(5_000_000)], ids=["nothing", "a byte", "megabytes"])
def test_a_pickle_arrives_whole(ends: tuple[socket.socket, socket.socket], data: bytes) -> None:
    sealed_pickle.send(ends[0], data)
    sealed_pickle.send(ends[0], b"second")
    assert sealed_pickle.receive(ends[1]) == data
    assert sealed_pickle.receive(ends[1]) == b"second"
    with pytest.raises(BlockingIOError):
        sealed_pickle.receive(ends[1])
    ends[0].close()
    assert sealed_pickle.receive(ends[1]) is None


def test_what_travels_cannot_be_changed(ends: tuple[socket.socket, socket.socket]) -> None:
    sealed_pickle.send(ends[0], b"data")
    _, (memory,), _, _ = socket.recv_fds(ends[1], 4, 1)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(memory, b"else", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(memory, 0)
    finally:
        os.close(memory)


def test_memory_that_is_not_sealed_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    memory = os.memfd_create("not_sealed", os.MFD_ALLOW_SEALING)
    socket.send_fds(ends[0], [b"\0\0\0\0"], [memory])
    os.close(memory)
    with pytest.raises(OSError, match="not sealed"):
        sealed_pickle.receive(ends[1])


def test_words_without_memory_are_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].send(b"\0\0\0\0")
    with pytest.raises(OSError, match="not a sealed pickle"):
        sealed_pickle.receive(ends[1])


def test_more_descriptors_than_one_message_holds(ends: tuple[socket.socket, socket.socket]) -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(300)]
    try:
        data, descriptors = sealed_pickle.pack("first", [reader for reader, _ in pipes])
        assert len(descriptors) == len(pipes)
        sealed_pickle.send(ends[0], data, descriptors)
        stream = io.BytesIO(sealed_pickle.receive(ends[1]) or b"")
        assert pickle.load(stream) == "first"
        readers = pickle.load(stream)
        for number, (_, writer) in enumerate(pipes):
            writer.send(number)
        assert [reader.recv() for reader in readers] == list(range(len(pipes)))
        for reader in readers:
            reader.close()
    finally:
        for pipe in pipes:
            for end in pipe:
                end.close()


def test_what_cannot_be_pickled_leaves_nothing_set() -> None:
    with pytest.raises(Exception, match="lambda"):
        sealed_pickle.pack(lambda: 0)
    assert multiprocessing.context.get_spawning_popen() is None
