"""How much memory a node has for the training's state: the numbers, the default limit, sizes in words. Pure.

The launcher computes the limit of all files of its node once, when it makes their folder. Whether the files of a rank
fit is decided by the rank, before the first byte (`ft_client/memory/room.py`): only the rank knows how large its state
is, and what the node has left by then.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.4
"""Of the smaller one of tmpfs and memory, the default of `--ft-memory-limit`. A tmpfs has half of the memory by
default, so that a fifth of the memory is used at most."""


@dataclass(frozen=True)
class MemoryRoom:
    """How much memory a process' cgroup may use, or the machine where no group has a limit. All in bytes.

    Attributes:
        limit: the smallest limit of the group and its parents, and of the machine.
        free: what may still be used before the kernel must kill: the least of the group, its parents and the machine.
            The page cache of files counts as free, since the kernel drops it; files in a tmpfs are no such cache.
    """

    limit: int
    free: int


def default_limit(tmpfs_size: int, memory: MemoryRoom | None) -> int:
    """Returns the default of `--ft-memory-limit` in bytes.

    Args:
        tmpfs_size: of the whole mount, in bytes.
        memory: of the launcher's cgroup; None: unknown.
    """
    least = tmpfs_size
    if memory is not None:
        least = min(least, memory.limit)
    return int(least * _SHARE)


def size_in_words(count: int) -> str:
    """Returns a number of bytes in words, in the largest unit that it fills."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"
