"""Whether the files of a state fit, before the first byte is written. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rank_monitor.contract.memory_room import MemoryRoom, size_in_words

_RESERVE = 0.05
"""The part of the mount, and of the memory, that stays free: workers of a DataLoader pass their batches through the
mount, and a worker that finds it full dies of SIGBUS. A process that meets the limit of its cgroup is killed."""


class NoRoom(Exception):
    """The files do not fit. The text says how much is missing, and what would fit."""


@dataclass(frozen=True)
class Room:
    """What is there, in bytes.

    Attributes:
        limit: what all files in the folder may have together.
        promised: the sizes of all files in it, apart from those of the rank that asks.
        promised_unwritten: how much of that is not allocated yet.
        mount_size: of the whole mount.
        mount_free: what is not allocated.
        own: what the files of the rank that asks have already. They are written again, so it counts as free.
        memory: what the cgroup of the rank may use, which is that of the launcher; None: unknown.
    """

    limit: int
    promised: int
    promised_unwritten: int
    mount_size: int
    mount_free: int
    own: int = 0
    memory: MemoryRoom | None = None

    def left(self) -> int:
        """Returns how many bytes the files of the rank that asks may have together."""
        bounds = [self.limit - self.promised]
        # Free memory counts twice otherwise: other ranks' files that have their size but not their memory yet take it.
        reusable = self.own - self.promised_unwritten
        bounds.append(self.mount_free + reusable - int(_RESERVE * self.mount_size))
        if self.memory is not None:
            bounds.append(self.memory.free + reusable - int(_RESERVE * self.memory.limit))
        return max(0, min(bounds))


def check(room: Room, file_bytes: int, keep: int) -> None:
    """Returns if `keep` generations and the one that is being written fit.

    Args:
        room: what is there.
        file_bytes: the size of one file.
        keep: complete generations.

    Raises:
        NoRoom: they do not fit.
    """
    left = room.left()
    needed = (keep + 1) * file_bytes
    if needed <= left:
        return
    fitting = left // file_bytes - 1
    text = f"{keep + 1} files of {size_in_words(file_bytes)} do not fit into the {size_in_words(left)} that are left"
    text += f" ({size_in_words(needed - left)} are missing; the limit of the node is {size_in_words(room.limit)},"
    text += f" its mount has {size_in_words(room.mount_free)} free"
    if room.memory is not None:
        text += f", its memory {size_in_words(room.memory.free)} of {size_in_words(room.memory.limit)}"
    text += ")"
    if fitting >= 1:
        text += f"; --ft-memory-keep {fitting} would fit"
    raise NoRoom(text)
