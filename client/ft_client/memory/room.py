"""Whether the files of a state fit, before the first byte is written. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_RESERVE = 0.05
"""The part of the mount that stays free: workers of a DataLoader pass their batches through it, and a worker that finds
it full dies of SIGBUS."""


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
        mount_free: what is not allocated; what the files of the rank that asks have already counts as free.
    """

    limit: int
    promised: int
    promised_unwritten: int
    mount_size: int
    mount_free: int

    def left(self) -> int:
        """Returns how many bytes the files of the rank that asks may have together."""
        on_mount = self.mount_free - self.promised_unwritten - int(_RESERVE * self.mount_size)
        return max(0, min(self.limit - self.promised, on_mount))


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
    text = f"{keep + 1} files of {_in_words(file_bytes)} do not fit into the {_in_words(left)} that are left"
    text += f" ({_in_words(needed - left)} are missing; the limit of the node is {_in_words(room.limit)},"
    text += f" its mount has {_in_words(room.mount_free)} free)"
    if fitting >= 1:
        text += f"; --ft-memory-keep {fitting} would fit"
    raise NoRoom(text)


def _in_words(size: int) -> str:
    """Returns a number of bytes for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
