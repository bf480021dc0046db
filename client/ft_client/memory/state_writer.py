"""Writes a rank's state into one of its files.

`StateWriter.copy` runs in the main thread and blocks the training: it takes the state and copies it. `finish` runs
behind the training (`background_work.py`): it computes the checksum, writes the header, and gives the file its name, last of
all. A file that is not finished never has a name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft_client.memory import checksum, kept_state, plain_state, safetensors_layout
from ft_client.memory.kept_state import KeptState
from ft_client.memory.rank_files import RankFiles, StoredFile
from ft_client.memory.safetensors_layout import FileLayout, TensorSpec
from ft_client.memory.tensor_parts import TYPES
from rank_monitor.contract.memory_files import StateFile

_PLAIN_SLACK = 64 * 1024
"""Room behind the plain state, so that a file need not grow for a list that becomes a little longer."""


@dataclass(frozen=True)
class CopiedState:
    """A state that is in its file, but for the header."""

    file: StoredFile
    layout: FileLayout
    plain_bytes: int
    metadata: Mapping[str, str]
    name: StateFile


class StateWriter:
    """Saves one rank's state again and again.

    Args:
        files: of this rank.
        safe_types: as for `MemoryCheckpoint`.
    """

    def __init__(self, files: RankFiles, safe_types: Sequence[type]) -> None:
        self._files = files
        self._safe_types = safe_types
        self._specs: dict[str, TensorSpec] = {}
        self._layout: FileLayout | None = None
        self._mesh_notes: dict[str, Any] = {}
        self._mesh_text = "{}"
        self._is_checked = False
        """Whether plain state of basic types has been read back."""
        self._targets: dict[int, tuple[FileLayout, Any, list[Any]]] = {}
        """By descriptor of a file: the layout and mapping for which its target tensors were made, and these."""

    def copy(
        self, objects: Mapping[str, Any], without_tensors: frozenset[str], name: StateFile, more: Mapping[str, str]
    ) -> CopiedState:
        """Copies the present state into a file. Returns what `finish` needs.

        Args:
            objects: as for `kept_state.collect`.
            without_tensors: as for `kept_state.collect`.
            name: that the file gets in the end.
            more: further texts for the header's metadata.

        Raises:
            CannotBeKept, NoRoom: it will not help to try again.
            AllFilesInUse, OSError: it may help.
        """
        state = kept_state.collect(objects, without_tensors)
        plain = plain_state.dump(state.plain)
        if state.others or not self._is_checked:
            plain_state.check_readable(plain, state.others, self._safe_types)
            self._is_checked = True
        notes = _mesh_notes(state)
        if notes != self._mesh_notes:
            self._mesh_notes = notes
            self._mesh_text = json.dumps(notes)
            self._layout = None
        metadata = {**more, "meshes": self._mesh_text}
        layout = self._layout_of(state, metadata)
        size = layout.tensors_end + len(plain)
        file = self._files.next_file(size + _PLAIN_SLACK)
        if file.mapping is None:
            _write_all(file, layout, state.parts)
        else:
            self._copy_all(file, layout, state.parts, size)
        _write(file.descriptor, plain, layout.tensors_end)
        return CopiedState(file, layout, len(plain), metadata, name)

    def finish(self, copied: CopiedState) -> None:
        """Makes a file whole, and the rank's other files ready for the next saves. Runs in the background's thread."""
        file, layout = copied.file, copied.layout
        end = layout.tensors_end + copied.plain_bytes
        file.allocate(end)
        file.truncate(end)
        content = memoryview(file.map(end))
        try:
            data_checksum = checksum.crc32(content[layout.data_offset : end])
        finally:
            content.release()
        _write(
            file.descriptor, safetensors_layout.header(layout, copied.metadata, copied.plain_bytes, data_checksum), 0
        )
        self._files.give_name(file, copied.name)
        self._files.map_all(end + _PLAIN_SLACK)

    def _layout_of(self, state: KeptState, metadata: Mapping[str, str]) -> FileLayout:
        """Returns the layout for a state; the one of the last save where nothing but values has changed."""
        specs = state.specs()
        if self._layout is None or specs != self._specs:
            self._specs = specs
            self._layout = safetensors_layout.plan(specs, metadata)
        return self._layout

    def _copy_all(self, file: StoredFile, layout: FileLayout, parts: Mapping[str, Any], size: int) -> None:
        """Copies all tensors into a mapping."""
        self._files.grow(file, size)
        mapping = file.map(size)
        known = self._targets.get(file.descriptor)
        if known is None or known[0] is not layout or known[1] is not mapping:
            targets = [_target(mapping, layout, name) for name in parts]
            self._targets[file.descriptor] = known = (layout, mapping, targets)
        with torch.no_grad():
            for target, part in zip(known[2], parts.values(), strict=True):
                target.copy_(part)


def _target(mapping: Any, layout: FileLayout, name: str) -> Any:
    """Returns the tensor that lies in the mapping at the place of a tensor of the state."""
    place = layout.tensors[name]
    dtype = TYPES[place.spec.kind]
    if not place.spec.size:
        return torch.empty(place.spec.shape, dtype=dtype)
    count = place.spec.size // dtype.itemsize
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=place.offset).view(place.spec.shape)


def _write_all(file: StoredFile, layout: FileLayout, parts: Mapping[str, Any]) -> None:
    """Writes all tensors into a file that is not mapped: faster than a new mapping, of which each page is a fault."""
    for name, part in parts.items():
        place = layout.tensors[name]
        if place.spec.size:
            flat = part.cpu().contiguous().view(-1).view(torch.uint8)
            _write(file.descriptor, flat.numpy(), place.offset)


def _write(descriptor: int, content: Any, offset: int) -> None:
    """Writes bytes at an offset. Raises OSError where there is no room."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written


def _mesh_notes(state: KeptState) -> dict[str, Any]:
    """Returns, for each part of a DTensor, mesh, placements and shape of the whole, for the file's header: so that
    other programs can put the shards of several files together."""
    return {
        note["parts"][0]: {key: note[key] for key in ("mesh", "placements", "shape")}
        for kept in state.plain["objects"].values()
        for note in kept["notes"]
        if "mesh" in note
    }
