"""The file of a part: its name, and the record at its end. Pure.

A file has what `torch.save` writes, then `RECORD_BYTES` bytes that say whose it is and what its checksum is. Programs
that read the file by `torch.load` do not mind these bytes.

A file that is being written has the token of its save in its name. So a writer that outlives its rank can never give
a good name to the file of a later save.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

_RECORD = struct.Struct("<8sQIQII16sI")
"""Magic, bytes of the state, their CRC-32, iteration, rank, ranks of the job, token, CRC-32 of the fields before."""
_MAGIC = b"FTPART01"
RECORD_BYTES = _RECORD.size
TOKEN_BYTES = 8
"""A token is that many random bytes, written as hexadecimal digits."""

_WHOLE = re.compile(r"iter_(\d{7,18})_(\d{1,9})_local\.pt", re.ASCII)
_OTHER = re.compile(r"iter_(\d{7,18})_(\d{1,9})_local\.(dirty-[0-9a-f]{16}|torn)\.pt", re.ASCII)


@dataclass(frozen=True)
class SavedPart:
    """What the record of a whole part says.

    Attributes:
        iteration: after which the state was saved.
        rank: that saved it.
        world: how many ranks the job had.
        token: of the save, the same for the parts of all ranks; sixteen hexadecimal digits.
        size: bytes of the state.
        checksum: their CRC-32.
    """

    iteration: int
    rank: int
    world: int
    token: str
    size: int
    checksum: int

    def pack(self) -> bytes:
        """Returns the record that stands at the end of the file."""
        fields = (_MAGIC, self.size, self.checksum, self.iteration, self.rank, self.world, self.token.encode())
        packed = _RECORD.pack(*fields, 0)[:-4]
        return packed + struct.pack("<I", zlib.crc32(packed))


def unpack(record: bytes, file_bytes: int) -> SavedPart | None:
    """Returns what a record says; None: it is none, so the file is not whole.

    Args:
        record: the last bytes of the file.
        file_bytes: the size of the file.
    """
    if len(record) != RECORD_BYTES:
        return None
    magic, size, checksum, iteration, rank, world, token, own = _RECORD.unpack(record)
    if magic != _MAGIC or own != zlib.crc32(record[:-4]) or size + RECORD_BYTES != file_bytes:
        return None
    return SavedPart(iteration, rank, world, token.decode("ascii", "replace"), size, checksum)


def file_name(iteration: int | str, rank: int | str, suffix: str = "") -> str:
    """Returns the name of a part's file. A text in the place of a number is taken as it is, as for a pattern."""
    if isinstance(iteration, int):
        iteration = f"{iteration:07}"
    return f"iter_{iteration}_{rank}_local{suffix}.pt"


def dirty_name(iteration: int, rank: int, token: str) -> str:
    """Returns the name of a part's file that is being written."""
    return file_name(iteration, rank, f".dirty-{token}")


def torn_name(iteration: int, rank: int) -> str:
    """Returns the name of a part whose checksum was found to be wrong."""
    return file_name(iteration, rank, ".torn")


def whole(name: str) -> tuple[int, int] | None:
    """Returns iteration and rank of a file that has the name of a whole part; None: the name is no such."""
    found = _WHOLE.fullmatch(name)
    if found is None:
        return None
    return int(found[1]), int(found[2])


def is_dirty(name: str) -> bool:
    """Whether a file is being written, or its writer has died."""
    found = _OTHER.fullmatch(name)
    return found is not None and found[3] != "torn"


def is_leftover(name: str) -> bool:
    """Whether a file is that of a part which is not whole: dirty, or torn."""
    return _OTHER.fullmatch(name) is not None
