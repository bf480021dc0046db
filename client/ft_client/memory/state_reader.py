"""Reads a file of a rank's state and verifies it. Whatever is in the file, it cannot make the reader run anything."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ft_client.memory import checksum, plain_state, safetensors_layout
from ft_client.memory.safetensors_layout import DamagedFile, PlacedTensor
from ft_client.memory.tensor_parts import TYPES
from rank_monitor.contract.memory_files import StateFile
from rank_monitor.contract.wire.foreign import open_regular

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: maps all pages at once, as they are read anyway. An older kernel refuses it."""


class StateReader:
    """A verified file.

    Its tensors lie in a private mapping: they are good until the file is written again, which its rank does only after
    the state has been copied out of it.

    Args:
        folder: of the node.
        name: of the file; its content must say the same.
        safe_types: as for `MemoryCheckpoint`.
        is_verified: another rank of this node verifies the content.

    Attributes:
        metadata: of the header.
        specs: name -> what the header says of each tensor.
        plain_bytes: the plain state as bytes.

    Raises:
        DamagedFile: the content is not what was written.
        OtherState: the plain state names types that are not admitted.
        OSError: the file cannot be read.
    """

    def __init__(self, folder: Path, name: StateFile, safe_types: Sequence[Any], is_verified: bool = False) -> None:
        with open_regular(folder / name.name, follow_link=False) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise DamagedFile(f"it belongs to user {status.st_uid}")
            beginning = file.read(8)
            length = safetensors_layout.header_bytes(beginning, status.st_size)
            parsed = safetensors_layout.parse(beginning + file.read(length - len(beginning)), status.st_size)
            self._mapping = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_COPY)
        if not is_verified:
            with suppress(OSError):
                self._mapping.madvise(_POPULATE_READ)
        if not is_verified:
            self._verify(parsed.metadata, parsed.data_offset)
        if any(parsed.metadata.get(key) != value for key, value in identity(name).items()):
            raise DamagedFile("its header is of another file")
        self.metadata = parsed.metadata
        self.specs = {key: place.spec for key, place in parsed.tensors.items()}
        begin, end = parsed.plain_state
        self.plain_bytes = self._mapping[begin:end]
        self.plain = plain_state.load(self.plain_bytes, safe_types)
        self.tensors = {key: self._tensor(place) for key, place in parsed.tensors.items()}

    def _verify(self, metadata: Mapping[str, str], data_offset: int) -> None:
        content = memoryview(self._mapping)
        try:
            computed = checksum.crc32(content[data_offset:])
        finally:
            content.release()
        if metadata.get(safetensors_layout.DATA_CHECKSUM) != f"{computed:08x}":
            raise DamagedFile("the checksum of its content is wrong")

    def _tensor(self, place: PlacedTensor) -> Any:
        dtype = TYPES[place.spec.kind]
        if not place.spec.size:
            return torch.empty(place.spec.shape, dtype=dtype)
        count = place.spec.size // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=place.offset).view(place.spec.shape)


def identity(name: StateFile) -> dict[str, str]:
    """Returns what a file's metadata say of its name, so that a file that was renamed is not taken for another one."""
    return {
        "step": str(name.step),
        "rank": str(name.rank),
        "world": str(name.world),
        "node_ranks": str(name.node_ranks),
        "series": name.series,
    }
