"""Whether copies of the state fit: a table of states, rooms and what is said."""

from __future__ import annotations

import dataclasses

import pytest

from rank_monitor.contract.memory_room import MemoryRoom, Room, copies, default_limit, refusal, size_in_words

GIB = 1 << 30
ROOM = Room(
    folder="/dev/shm/ft_memory_x",
    limit=40 * GIB,
    held=0,
    tmpfs_size=100 * GIB,
    tmpfs_free=100 * GIB,
    memory=MemoryRoom(200 * GIB, 150 * GIB),
)


@pytest.mark.parametrize(
    ("state", "keep", "changes"),
    [
        (0, 2, {}),
        (13 * GIB, 2, {}),
        (20 * GIB, 1, {}),
        # What the job's files take is written again, also where the tmpfs is full with it.
        (10 * GIB, 2, {"held": 30 * GIB, "tmpfs_free": 11 * GIB}),
        (10 * GIB, 2, {"memory": None}),
    ],
)
def test_fits(state: int, keep: int, changes: dict[str, object]) -> None:
    assert refusal(state, keep, dataclasses.replace(ROOM, **changes)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "keep", "changes", "missing", "fitting", "says"),
    [
        # The limit is the least.
        (
            14 * GIB,
            2,
            {},
            2 * GIB,
            1,
            ("need 42.0 GiB", "--ft-memory-limit allows 40.0 GiB", "--ft-memory-keep 1 would"),
        ),
        (5 * GIB, 9, {}, 10 * GIB, 7, ("--ft-memory-keep 9", "--ft-memory-keep 7 would fit")),
        (30 * GIB, 2, {}, 50 * GIB, 0, ("50.0 GiB are missing", "--ft-memory-keep 1 would need 60.0 GiB")),
        # The tmpfs: a tenth of it stays free.
        (
            10 * GIB,
            2,
            {"tmpfs_free": 35 * GIB},
            5 * GIB,
            1,
            ("/dev/shm/ft_memory_x has room for 25.0 GiB", "DataLoader"),
        ),
        (1, 2, {"tmpfs_free": 9 * GIB}, 3, 0, ("has room for 0 bytes",)),
        # The cgroup: a tenth of its limit stays free.
        (
            10 * GIB,
            2,
            {"memory": MemoryRoom(50 * GIB, 30 * GIB)},
            5 * GIB,
            1,
            ("the memory limit of 50.0 GiB leaves 25.0 GiB",),
        ),
    ],
)
def test_does_not_fit(
    state: int, keep: int, changes: dict[str, object], missing: int, fitting: int, says: tuple[str, ...]
) -> None:
    found = refusal(state, keep, dataclasses.replace(ROOM, **changes))  # type: ignore[arg-type]
    assert found is not None
    assert (found.missing, found.keep) == (missing, fitting)
    assert all(text in found.reason for text in says), found.reason
    assert "\n" not in found.reason
    if fitting:
        assert refusal(state, fitting, dataclasses.replace(ROOM, **changes)) is None  # type: ignore[arg-type]


def test_the_copy_that_is_being_written_counts() -> None:
    assert copies(1) == 2
    assert refusal(20 * GIB + 1, 1, ROOM) is not None


@pytest.mark.parametrize(
    ("tmpfs_size", "memory", "expected"),
    [
        (100, MemoryRoom(1000, 1), 40),
        (100, MemoryRoom(50, 1), 20),
        (100, None, 40),
    ],
)
def test_the_default_limit(tmpfs_size: int, memory: MemoryRoom | None, expected: int) -> None:
    assert default_limit(tmpfs_size, memory) == expected


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (5 << 30, "5.0 GiB")],
)
def test_sizes_in_words(count: int, words: str) -> None:
    assert size_in_words(count) == words
