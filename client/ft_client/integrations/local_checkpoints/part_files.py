"""Writes and reads the file of one part. Asks no other rank.

A part is a pickle, which may run any code when it is read. So a file is read only if it is a regular file of this user
which nobody else can write, in a folder of this user with mode 0700, and after its checksum was found right.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ft_client.integrations.local_checkpoints.part_format import RECORD_BYTES, SavedPart, unpack
from ft_client.memory.checksum import crc32

_CHUNK = 8 << 20
"""Bytes that are read at once to verify a file."""


class TornPart(Exception):
    """A file is proven not to have what was written into it."""


class NotReadable(Exception):
    """A file or its folder is not this user's own, or others may write into it."""


class Overtaken(Exception):
    """Another save has written the part of the same name in the meantime."""


class _Summed:
    """A file that `torch.save` writes into, with the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.checksum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.checksum = crc32(view, self.checksum)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write(state: object, path: Path, final: Path, part: SavedPart, found: str | None = None) -> None:
    """Writes a part and gives its file the name of a whole one.

    Args:
        state: what `torch.save` takes.
        path: of the file while it is written; there must be none.
        final: its name then; a file of this name is replaced.
        part: what the record says; size and checksum are filled in here.
        found: the token of the part that had this name when the save began, and may be replaced; empty: there was none;
            None: any part may be replaced.

    Raises:
        Overtaken: the part of this name is that of another save than was found. It stays.
        OSError: there is no room, or the like. No file is left then.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            summed = _Summed(file)
            torch.save(state, summed)
            record = SavedPart(part.iteration, part.rank, part.world, part.token, summed.size, summed.checksum)
            file.write(record.pack())
        there = part_of(final)
        if found is not None and there is not None and there.token != found:
            raise Overtaken(f"{final.name} was written by another save in the meantime")
        path.rename(final)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def part_of(path: Path) -> SavedPart | None:
    """Returns what the record at the end of a file says; None: there is no such file, or it is not whole, or it must
    not be read. The state itself is not read."""
    try:
        with _opened(path) as file:
            return _record_of(file)
    except (OSError, NotReadable):
        return None


def read(path: Path) -> tuple[Any, SavedPart]:
    """Returns the state in a file, and what its record says.

    Raises:
        FileNotFoundError: there is no such file.
        TornPart: the file has not what was written.
        NotReadable: it may not be read.
        Exception: whatever the objects in the state raise as they are made.
    """
    with _opened(path) as file:
        part = _record_of(file)
        if part is None:
            raise TornPart(f"{path.name} is not whole")
        found = 0
        left = part.size
        file.seek(0)
        while left:
            data = file.read(min(_CHUNK, left))
            if not data:
                raise TornPart(f"{path.name} has lost its end")
            found = crc32(data, found)
            left -= len(data)
        if found != part.checksum:
            raise TornPart(f"{path.name} has another checksum than when it was written")
        file.seek(0)
        return torch.load(file, weights_only=False), part


def make_folder(path: Path) -> None:
    """Makes a folder for parts, with those above it, or makes sure that one which is there is this user's alone.

    Raises:
        NotReadable: it is another user's.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise NotReadable(f"{path} is no folder of this user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading if it may be read.

    Raises:
        NotReadable, OSError: see above.
    """
    above = os.lstat(path.parent)
    if not stat.S_ISDIR(above.st_mode) or above.st_uid != os.geteuid() or stat.S_IMODE(above.st_mode) & 0o077:
        raise NotReadable(f"{path.parent} is no folder that only this user can use")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise NotReadable(f"{path} is no file that only this user can write")
    except NotReadable:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _record_of(file: BinaryIO) -> SavedPart | None:
    size = os.fstat(file.fileno()).st_size
    if size < RECORD_BYTES:
        return None
    return unpack(os.pread(file.fileno(), RECORD_BYTES, size - RECORD_BYTES), size)
