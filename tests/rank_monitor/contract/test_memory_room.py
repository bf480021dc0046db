"""The default limit of state in memory, and sizes in words."""

from __future__ import annotations

import pytest

from rank_monitor.contract.memory_room import MemoryRoom, default_limit, size_in_words


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
