"""The two ends of a socket of whole messages."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rank_monitor.contract.wire import channel, codec
from tests.rank_monitor.node import ended


def _accepted(listener: socket.socket) -> socket.socket:
    assert ended(listener.fileno())
    connection, _ = listener.accept()
    connection.setblocking(False)
    return connection


@pytest.mark.parametrize("length", [10, 107, 108, 250])
def test_connects_whatever_the_length_of_the_path(tmp_path: Path, length: int) -> None:
    folder = tmp_path
    while len(str(folder)) + 2 < length:
        folder = folder / ("d" * min(200, length - len(str(folder)) - 1))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "m0"
    with channel.listen(path) as listener, channel.connect(path) as client:
        assert path.stat().st_mode & 0o777 == 0o600
        with _accepted(listener) as server:
            assert channel.peer(server) == channel.Peer(os.getpid(), os.getuid())
            assert channel.send(client, b"hello")
            assert channel.receive(server) == (b"hello", [])
            assert channel.receive(server) is None


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        channel.connect(tmp_path / "m0")
    listener = channel.listen(tmp_path / "m0")
    with pytest.raises(OSError, match="in use"):
        channel.listen(tmp_path / "m0")
    listener.close()
    with pytest.raises(OSError, match="refused"):
        channel.connect(tmp_path / "m0")


def test_messages_stay_whole_and_an_oversized_one_is_cut_beyond_what_decodes() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        for data in (b"one", b"two", bytes(codec.MAX_MESSAGE + 500)):
            assert channel.send(ours, data)
        assert channel.receive(theirs) == (b"one", [])
        assert channel.receive(theirs) == (b"two", [])
        taken = channel.receive(theirs)
        assert taken is not None
        assert len(taken[0]) == codec.MAX_MESSAGE + 1
        assert channel.receive(theirs) is None


def test_a_full_queue_costs_the_message_and_nothing_else() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        sent = 0
        while channel.send(ours, b"x" * 1000):
            sent += 1
        assert not channel.send(ours, b"x")
        while channel.receive(theirs):
            sent -= 1
        assert sent == 0
        assert channel.send(ours, b"x")


def test_the_end_and_an_empty_message_are_told_apart() -> None:
    ours, theirs = channel.pair()
    with theirs:
        channel.send(ours, b"")
        assert channel.receive(theirs) == (b"", [])
        assert not channel.closed(theirs)
        channel.send(ours, b"last")
        ours.close()
        assert channel.receive(theirs) == (b"last", [])
        assert channel.receive(theirs) == (b"", [])
        assert channel.closed(theirs)
        with pytest.raises(OSError, match="pipe"):
            channel.send(theirs, b"x")


def test_descriptors_travel_and_are_not_inherited_further() -> None:
    ours, theirs = channel.pair()
    reader, writer = os.pipe()
    with ours, theirs:
        channel.send(ours, b"take", (reader, writer))
        taken = channel.receive(theirs, max_descriptors=2)
        assert taken is not None
        data, (reader_there, writer_there) = taken
        assert data == b"take"
        assert not os.get_inheritable(reader_there)
        os.write(writer_there, b"!")
        assert os.read(reader, 1) == b"!"
        for descriptor in (reader, writer, reader_there, writer_there):
            os.close(descriptor)
        assert channel.receive(theirs, max_descriptors=2) is None
