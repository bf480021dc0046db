"""The files of a state on their way between two nodes: whatever goes wrong, no whole file is left that was not sent."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract.copy_records import (
    GET,
    MAX_RANKS,
    CopyAnswer,
    CopyRequest,
    FileEnd,
    FileHead,
    HeldState,
    copies_name,
    held_states,
    is_copies_name,
)
from rank_monitor.contract.memory_files import StateFile, set_aside_name
from rank_monitor.contract.wire.proven_link import LinkError
from rank_monitor.copy_transfer import Refused, Transfer, finish
from tests.patience import patient

STATE = HeldState(5, 2, "0a1b2c3d", [0, 1], is_own=True)
CONTENTS = [os.urandom(3 << 20), b"short"]
SECRET = b"0123456789abcdef"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name, content in zip(STATE.files(), CONTENTS, strict=True):
        (source / name).write_bytes(content)
    return source, target


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


def nothing(count: int) -> None:
    """What nobody counts."""


def between(
    ends: tuple[socket.socket, socket.socket],
    sends: Callable[[Transfer], Any],
    receives: Callable[[Transfer], Any],
    secret: bytes | None = SECRET,
) -> tuple[Exception | None, Exception | None]:
    """What two ends come to that each do something."""

    def run(end: int, what: Callable[[Transfer], Any]) -> None:
        try:
            what(Transfer(ends[end], "job", secret, connects=end == 0))
        except (Refused, LinkError, OSError) as problem:
            problems[end] = problem
            ends[end].close()

    problems: list[Exception | None] = [None, None]
    thread = threading.Thread(target=run, args=(0, sends))
    thread.start()
    run(1, receives)
    thread.join(patient(60))
    return problems[0], problems[1]


def receive(target: Path, sizes: list[int] | None = None) -> Callable[[Transfer], None]:
    sizes = sizes or [len(content) for content in CONTENTS]
    return lambda transfer: transfer.receive_files(target, STATE.files(), sizes, nothing)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_the_files_of_a_state_arrive_as_they_were(
    folders: tuple[Path, Path], ends: tuple[socket.socket, socket.socket], secret: bytes | None
) -> None:
    source, target = folders
    problems = between(
        ends, lambda transfer: transfer.send_files(source, STATE.files(), nothing), receive(target), secret
    )
    assert problems == (None, None)
    assert held_states([path.name for path in target.iterdir()], {}) == []
    finish(target, STATE)
    assert [(target / name).read_bytes() for name in STATE.files()] == CONTENTS
    assert held_states([path.name for path in target.iterdir()], {}) == [STATE]
    assert {(target / name).stat().st_mode & 0o777 for name in STATE.files()} == {0o600}


def renames(folder: Path) -> Callable[[int], None]:
    """The rank takes the file's name away to write it again, once some bytes have gone."""

    def moved(count: int) -> None:
        path = folder / STATE.files()[0]
        if path.exists():
            path.rename(folder / "rank-0_slot-0.unfinished")

    return moved


def test_a_file_that_is_written_again_meanwhile_is_not_taken(
    folders: tuple[Path, Path], ends: tuple[socket.socket, socket.socket]
) -> None:
    source, target = folders
    sent, received = between(
        ends, lambda transfer: transfer.send_files(source, STATE.files(), renames(source)), receive(target)
    )
    assert isinstance(sent, Refused) and "written again" in str(sent)
    assert isinstance(received, Refused) and "written again" in str(received)
    assert not list(target.iterdir())


def by_hand(
    ends: tuple[socket.socket, socket.socket], head: FileHead, size: int, content: bytes, end: FileEnd | None
) -> Callable[[Transfer], None]:
    """A node that says one thing and does another."""

    def send(transfer: Transfer) -> None:
        transfer.say(head, size)
        ends[0].sendall(content)
        if end is None:
            ends[0].close()
        else:
            transfer.say(end)

    return send


DIGEST = hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "end", "said"),
    [
        (STATE.files()[0], b"abd", FileEnd(DIGEST, True), "was damaged on its way"),
        (STATE.files()[1], b"abc", FileEnd(DIGEST, True), "sends another file than it said"),
        ("../" + STATE.files()[0], b"abc", FileEnd(DIGEST, True), "sends another file than it said"),
        (STATE.files()[0], b"ab", FileEnd(DIGEST, True), "sends another file than it said"),
        (STATE.files()[0], b"abcd", FileEnd(DIGEST, True), "sends 4 bytes, and 3 is the most"),
        (STATE.files()[0], b"abc", None, "has closed the connection"),
    ],
)
def test_what_was_not_said_is_not_taken(
    folders: tuple[Path, Path],
    ends: tuple[socket.socket, socket.socket],
    name: str,
    content: bytes,
    end: FileEnd | None,
    said: str,
) -> None:
    _, target = folders
    sends = by_hand(ends, FileHead(name), len(content), content, end)
    problem = between(ends, sends, receive(target, [3, 3]))[1]
    assert problem is not None and said in str(problem)
    assert not list(target.iterdir())


def test_a_node_that_dies_in_the_middle_leaves_nothing(
    folders: tuple[Path, Path], ends: tuple[socket.socket, socket.socket]
) -> None:
    source, target = folders

    def dies(count: int) -> None:
        ends[0].shutdown(socket.SHUT_RDWR)

    problem = between(ends, lambda transfer: transfer.send_files(source, STATE.files(), dies), receive(target))[1]
    assert isinstance(problem, LinkError)
    assert not list(target.iterdir())


def test_a_refusal_says_why(ends: tuple[socket.socket, socket.socket]) -> None:
    asks, _ = between(
        ends, lambda transfer: transfer.must_agree(), lambda transfer: transfer.say(CopyAnswer("no room"))
    )
    assert isinstance(asks, Refused) and str(asks) == "no room"


def test_a_record_of_another_kind_ends_the_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    hears, _ = between(ends, lambda transfer: transfer.hear(CopyRequest), lambda transfer: transfer.say(CopyAnswer()))
    assert isinstance(hears, LinkError) and "cannot be read" in str(hears)


@pytest.mark.parametrize(
    ("step", "world", "series", "ranks"),
    [
        (5, 2, "0a1b2c3d", []),
        (5, 2, "0a1b2c3d", [1, 0]),
        (5, 2, "0a1b2c3d", [0, 0]),
        (5, 2, "0a1b2c3d", [1, 2]),
        (5, 2, "0a1b2c3d", [-1, 1]),
        (-5, 2, "0a1b2c3d", [0, 1]),
        (10**18, 2, "0a1b2c3d", [0, 1]),
        (5, 2, "../../..", [0, 1]),
        (5, 2, "", [0, 1]),
        (5, 10**6, "0a1b2c3d", list(range(MAX_RANKS + 1))),
    ],
)
def test_what_names_no_files_of_ours_is_no_request(step: int, world: int, series: str, ranks: list[int]) -> None:
    assert CopyRequest(GET, step, world, series, ranks).state() is None


def test_states_that_are_set_aside_are_not_offered() -> None:
    def names(step: int, ranks: tuple[int, ...] = (0,)) -> list[str]:
        return [StateFile(step, rank, 2, len(ranks), "0a1b2c3d").name for rank in ranks]

    folder = copies_name(2, [1])
    assert is_copies_name(folder)
    assert not is_copies_name(names(5)[0])
    copies = {folder: names(5, (1,)) + names(9, (1,)), copies_name(2, [0, 1]): names(7, (0, 1))[:1]}
    held = held_states([*names(5), *names(9), set_aside_name(9)], copies)
    assert held == [HeldState(5, 2, "0a1b2c3d", [0], True), HeldState(5, 2, "0a1b2c3d", [1], False)]
