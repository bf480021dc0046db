"""Whether files fit, and what is said where they do not."""

from __future__ import annotations

import dataclasses

import pytest

from ft_client.memory import room
from ft_client.memory.room import NoRoom, Room
from rank_monitor.contract.memory_room import MemoryRoom

MiB = 1 << 20


def made(limit: int = 1000, promised: int = 0, unwritten: int = 0, free: int = 10_000, own: int = 0) -> Room:
    """A node whose mount has 10,000 MiB; all in MiB."""
    return Room(limit * MiB, promised * MiB, unwritten * MiB, 10_000 * MiB, free * MiB, own * MiB)


def in_cgroup(limit: int, free: int, **more: int) -> Room:
    """The same with a limit of memory."""
    return dataclasses.replace(made(**more), memory=MemoryRoom(limit * MiB, free * MiB))


@pytest.mark.parametrize(
    ("there", "left"),
    [
        (made(), 1000),
        (made(promised=400), 600),
        (made(promised=1400), 0),
        # Of the mount a twentieth stays free, and what others have promised to themselves is theirs.
        (made(free=900), 400),
        (made(free=900, promised=100, unwritten=100), 300),
        (made(free=500), 0),
        # The own files are written again.
        (made(free=500, own=300), 300),
        # The same holds for the memory of the cgroup.
        (in_cgroup(2000, 1500), 1000),
        (in_cgroup(2000, 700), 600),
        (in_cgroup(2000, 700, own=50), 650),
        (in_cgroup(2000, 700, promised=200, unwritten=200), 400),
        (in_cgroup(2000, 50), 0),
    ],
)
def test_what_is_left(there: Room, left: int) -> None:
    assert there.left() == left * MiB


def test_files_that_fit_pass() -> None:
    room.check(made(limit=300), 100 * MiB, keep=2)


@pytest.mark.parametrize(
    ("limit", "keep", "says"),
    [
        (299, 2, "3 files of 100.0 MiB do not fit into the 299.0 MiB that are left (1.0 MiB are missing; the limit of"),
        (299, 2, "; --ft-memory-keep 1 would fit"),
        (450, 4, "; --ft-memory-keep 3 would fit"),
    ],
)
def test_what_does_not_fit_is_said_in_numbers(limit: int, keep: int, says: str) -> None:
    with pytest.raises(NoRoom) as refused:
        room.check(made(limit=limit), 100 * MiB, keep)
    assert says in str(refused.value)


def test_no_advice_is_given_where_nothing_would_fit() -> None:
    with pytest.raises(NoRoom) as refused:
        room.check(made(limit=150), 100 * MiB, keep=2)
    assert "would fit" not in str(refused.value)


def test_the_memory_is_named_where_it_is_known() -> None:
    with pytest.raises(NoRoom, match=r"its memory 700\.0 MiB of 2\.0 GiB\); --ft-memory-keep 1 would fit"):
        room.check(in_cgroup(2048, 700), 250 * MiB, keep=2)
