"""Decides whether the copies of the training's state fit into a node's memory, before the first byte is written. Pure.

Who asks: the ranks, since only they know how large the state is. At the first save, and when the state has grown, they
add up what the ranks of the node need, have `processes/tmpfs.py: look` read the numbers of the node, and ask `refusal`.
The launcher asks only for `default_limit`, when it makes the folder.

Three bounds hold, and the least of them counts: `--ft-memory-limit`, the room in the tmpfs, and what the kernel lets
the cgroup use. Of the last two a tenth stays free (`_RESERVE`): the workers of a DataLoader share their batches by the
same tmpfs, and a rank that finds it full dies of SIGBUS; one that meets the cgroup's limit is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.4
"""Of the smaller one of tmpfs and memory, the default of `--ft-memory-limit`. A tmpfs has half of the memory by
default, so that a fifth of the memory is used at most."""
_RESERVE = 0.1
"""Of the tmpfs, and of the memory."""


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


@dataclass(frozen=True)
class Room:
    """The numbers of a node, all in bytes.

    Attributes:
        folder: the tmpfs, for messages.
        limit: what `--ft-memory-limit` allows.
        held: what the job's files take already. It counts as free, since they are written again.
        tmpfs_size: of the tmpfs.
        tmpfs_free: of it.
        memory: what the cgroup may use; None: unknown.
    """

    folder: str
    limit: int
    held: int
    tmpfs_size: int
    tmpfs_free: int
    memory: MemoryRoom | None


@dataclass(frozen=True)
class Refusal:
    """Why the copies of the state do not fit.

    Attributes:
        missing: bytes.
        keep: the most complete copies that would fit; 0: not even one.
        reason: one line for the user, with numbers and what to do.
    """

    missing: int
    keep: int
    reason: str


def default_limit(tmpfs_size: int, memory: MemoryRoom | None) -> int:
    """Returns the default of `--ft-memory-limit` in bytes; arguments as the attributes of `Room`."""
    least = tmpfs_size
    if memory is not None:
        least = min(least, memory.limit)
    return int(least * _SHARE)


def copies(keep: int) -> int:
    """Returns how many copies of the state are in memory at most: the complete ones, and the one that is written."""
    return keep + 1


def refusal(state: int, keep: int, room: Room) -> Refusal | None:
    """Returns why the copies do not fit; None: they do.

    Args:
        state: bytes of one copy, of all ranks of the node.
        keep: complete copies that are to be kept.
        room: of the node.
    """
    most, bound = min(_bounds(room))
    need = copies(keep) * state
    if need <= most:
        return None
    fitting = max(0, most // max(state, 1) - 1)
    reason = (
        f"{copies(keep)} copies of the state (--ft-memory-keep {keep}, and the one being written) need "
        f"{size_in_words(need)} on this node, and {bound}: {size_in_words(need - most)} are missing. "
    )
    if fitting:
        reason += f"--ft-memory-keep {fitting} would fit"
    else:
        reason += f"--ft-memory-keep 1 would need {size_in_words(copies(1) * state)}"
    return Refusal(need - most, fitting, reason)


def _bounds(room: Room) -> list[tuple[int, str]]:
    """Returns each bound: how many bytes all files of the job may take, and the bound in words."""
    reserve = int(room.tmpfs_size * _RESERVE)
    in_tmpfs = max(0, room.tmpfs_free + room.held - reserve)
    found = [
        (room.limit, f"--ft-memory-limit allows {size_in_words(room.limit)}"),
        (
            in_tmpfs,
            f"{room.folder} has room for {size_in_words(in_tmpfs)} beside {size_in_words(reserve)} that stay free for "
            "others, such as DataLoader workers",
        ),
    ]
    if room.memory is not None:
        reserve = int(room.memory.limit * _RESERVE)
        in_memory = max(0, room.memory.free + room.held - reserve)
        text = (
            f"the memory limit of {size_in_words(room.memory.limit)} leaves {size_in_words(in_memory)} beside "
            f"{size_in_words(reserve)} that stay free"
        )
        found.append((in_memory, text))
    return found


def size_in_words(count: int) -> str:
    """Returns a number of bytes in words, in the largest unit that it fills."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"
