"""How far each rank is, and what its saves in memory have cost: one small file of a rank in the node's folder.

A rank keeps the file mapped, and stores a number into it after each step. That takes under a microsecond, needs no
message, and wakes no monitor. As the folder belongs to the launcher (`memory_files.py`), the file outlives the rank: at
a fault the last step is known exactly, also after SIGKILL. The ranks read the files of their node in `load()`, and find
by them how many steps are lost; the launcher reads them at the end of a cycle, and for its status.

Each field is stored by itself, so a reader may see one field of before and another of after. A store of eight aligned
bytes is never seen in half.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from rank_monitor.contract.wire.foreign import read_file

_NAME = re.compile(r"progress_rank-(\d{1,9})", re.ASCII)
_MAGIC = b"ftprogr1"
"""Another release whose fields are others begins its files with other bytes."""
MAX_NUMBER = 2**62
"""No field of a rank that means well is larger."""


@dataclass(frozen=True)
class RankProgress:
    """What a rank says. Moments are monotonic nanoseconds.

    Attributes:
        step: how many steps the training has done, as the program said last; right after `load()` the step from which
            the training goes on.
        saves: how many saves this process has finished.
        failed: how many have failed.
        cost_ns: for how long the saves have held up the training in all, without the first one.
        first_cost_ns: the same of the first one, which also makes the files.
        size: bytes of the last save.
        began_ns: when the training went on, after `load()`.
        at_ns: when `step` was said.
    """

    step: int = 0
    saves: int = 0
    failed: int = 0
    cost_ns: int = 0
    first_cost_ns: int = 0
    size: int = 0
    began_ns: int = 0
    at_ns: int = 0

    @property
    def share(self) -> float | None:
        """The share of the time that saves took, without the first save; None: no time has passed, or none counts
        yet."""
        passed_ns = self.at_ns - self.began_ns - self.first_cost_ns
        if self.saves < 2 or passed_ns <= 0:
            return None
        return min(1.0, self.cost_ns / passed_ns)


_FIELDS = tuple(field.name for field in fields(RankProgress))
_RECORD = struct.Struct(f"<8s{len(_FIELDS)}Q")
SIZE = _RECORD.size
OFFSETS = {name: len(_MAGIC) + 8 * number for number, name in enumerate(_FIELDS)}
"""Field -> where its eight bytes are, which are a little-endian number."""


def progress_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"progress_rank-{rank}"


def rank_of(name: str) -> int | None:
    """Returns the rank in the name of such a file; None: the name is not one."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return int(found[1])


def pack(progress: RankProgress) -> bytes:
    """Returns the bytes of a file."""
    return _RECORD.pack(_MAGIC, *astuple(progress))


def unpack(content: bytes) -> RankProgress | None:
    """Returns the content of a file of progress; None: another release has written the file."""
    if len(content) != SIZE or not content.startswith(_MAGIC):
        return None
    _, *numbers = _RECORD.unpack(content)
    if max(numbers) > MAX_NUMBER:
        return None
    return RankProgress(*numbers)


def read_all(folder: str, names: Iterable[str]) -> dict[int, RankProgress]:
    """Returns what the ranks of a node say, by rank. A file that is gone or is not ours is left out.

    Args:
        folder: of the node.
        names: its listing.
    """
    found = {}
    for name in names:
        rank = rank_of(name)
        if rank is None:
            continue
        try:
            progress = unpack(read_file(Path(folder) / name, most=SIZE))
        except OSError:
            continue
        if progress is not None:
            found[rank] = progress
    return found
