"""Writes a rank's state into one of its files.

`StateWriter.copy` runs in the main thread and blocks the training: it takes the state and copies its tensors. `finish`
runs behind the training (`background_work.py`): it writes the plain state, computes the checksum, writes the header,
and gives the file its name, last of all. A file that is not finished never has a name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ft_client.memory import checksum, kept_state, overlap, plain_state, safetensors_layout, tensor_parts
from ft_client.memory.kept_state import KeptState, KnownStructures, ObjectStructure
from ft_client.memory.overlapped_copy import OverlappedCopy
from ft_client.memory.rank_files import RankFiles, StoredFile
from ft_client.memory.safetensors_layout import FileLayout, HeaderTooLong
from ft_client.memory.tensor_parts import TYPES, CannotBeKept
from rank_monitor.contract.memory_files import StateFile

_PLAIN_ROOM = 64 * 1024
"""Room for the plain state is a multiple of this: twice what is needed, so that a file need not grow for a list that
becomes longer."""


@dataclass(frozen=True)
class CopiedState:
    """A state whose tensors are in their file.

    Attributes:
        file: the file.
        layout: of the file.
        state: where it is taken from. Its tensors have changed since.
        plain: the plain state as bytes; None: it is not written yet.
        metadata: for the header.
        name: that the file gets in the end.
        later: the tensors that are not in the file yet: `finish` copies them.
    """

    file: StoredFile
    layout: FileLayout
    state: KeptState
    plain: bytes | None
    metadata: Mapping[str, str]
    name: StateFile
    later: OverlappedCopy


class StateWriter:
    """Saves one rank's state again and again.

    Args:
        files: of this rank.
        safe_types: as for `MemoryCheckpoint`.
    """

    def __init__(self, files: RankFiles, safe_types: Sequence[Any]) -> None:
        self._files = files
        self._safe_types = safe_types
        self._known = KnownStructures()
        self._structures: Sequence[ObjectStructure] = ()
        """From which the layout and the text about meshes follow."""
        self._mesh_text = "{}"
        self._layout: FileLayout | None = None
        self._plain_room = _PLAIN_ROOM
        self._is_checked = False
        """Whether plain state of basic types has been read back."""
        self._targets: dict[int, tuple[FileLayout, Any, list[Any]]] = {}
        """By descriptor of a file: the layout and mapping for which its target tensors were made, and these."""

    def copy(
        self,
        objects: Mapping[str, Any],
        written_elsewhere: frozenset[str],
        name: StateFile,
        more: Mapping[str, str],
        overlaps: bool = False,
    ) -> CopiedState:
        """Copies the present state into a file. Returns what `finish` needs.

        Args:
            objects: as for `kept_state.collect`.
            written_elsewhere: as for `kept_state.collect`.
            name: that the file gets in the end.
            more: further texts for the header's metadata.
            overlaps: whether `finish` copies what only the optimizers change. Not into a file that is not mapped yet.

        Raises:
            CannotBeKept, NoRoom: it will not help to try again.
            OSError: it may help.
        """
        state = kept_state.collect(objects, written_elsewhere, self._known)
        plain = None
        if state.others or not self._is_checked:
            # What these values hold may change as soon as the training goes on. And what torch's reader admits is
            # known to this process as a whole, so no other thread asks it.
            plain = plain_state.dump(state.plain())
            plain_state.check_readable(plain, state.others, self._safe_types)
            self._is_checked = True
        layout = self._layout_of(state, more)
        metadata = {**more, "meshes": self._mesh_text}
        file = self._files.next_file(layout.size)
        self._files.promise(file, layout.size)
        later = OverlappedCopy()
        if file.mapping is None:
            _write_all(file, layout, state.parts)
        else:
            memory: frozenset[int] = frozenset()
            if overlaps:
                with torch.no_grad():
                    memory = overlap.memory_of_optimizers(objects)
            self._copy_all(file, layout, state.parts, memory, later)
        return CopiedState(file, layout, state, plain, metadata, name, later)

    def finish(self, copied: CopiedState) -> None:
        """Makes a file whole, and the rank's other files ready for the next saves. Runs in the background's thread.

        Raises:
            StateChanged: a tensor changed before it was copied. The file gets no name.
            NoRoom: the plain state has become larger, and the files do not fit any more.
            OSError: there is no room.
        """
        copied.later.run()
        file, layout = copied.file, copied.layout
        plain = copied.plain
        if plain is None:
            plain = plain_state.dump(copied.state.plain())
        if len(plain) > layout.plain_room:
            self._plain_room = _PLAIN_ROOM * (2 * len(plain) // _PLAIN_ROOM + 1)
            layout = replace(layout, plain_room=self._plain_room)
        self._files.grow(file, layout.size)
        _write(file.descriptor, plain.ljust(layout.plain_room, b"\0"), layout.tensors_end)
        content = memoryview(file.map(layout.size))
        try:
            data_checksum = checksum.crc32(content[layout.data_offset : layout.size])
        finally:
            content.release()
        _write(file.descriptor, safetensors_layout.header(layout, copied.metadata, len(plain), data_checksum), 0)
        file.truncate(layout.size)
        self._files.give_name(file, copied.name)
        self._files.map_all(layout.size)

    def _layout_of(self, state: KeptState, more: Mapping[str, str]) -> FileLayout:
        """Returns the layout for a state; the one of the last save where nothing but values has changed. Raises
        CannotBeKept."""
        if state.structures != self._structures:
            self._mesh_text = json.dumps(state.mesh_notes())
            self._layout = None
        if self._layout is None or self._layout.plain_room != self._plain_room:
            metadata = {**more, "meshes": self._mesh_text}
            try:
                self._layout = safetensors_layout.plan(state.specs(), metadata, self._plain_room)
            except HeaderTooLong as problem:
                raise CannotBeKept(str(problem)) from None
        self._structures = state.structures
        return self._layout

    def _copy_all(
        self,
        file: StoredFile,
        layout: FileLayout,
        parts: Mapping[str, Any],
        memory: frozenset[int],
        later: OverlappedCopy,
    ) -> None:
        """Copies all tensors into a mapping, but those that lie in `memory`: adds these to `later`."""
        self._files.grow(file, layout.size)
        mapping = file.map(layout.size)
        known = self._targets.get(file.descriptor)
        if known is None or known[0] is not layout or known[1] is not mapping:
            targets = [_target(mapping, layout, name) for name in parts]
            self._targets[file.descriptor] = known = (layout, mapping, targets)
        with torch.no_grad():
            for target, (name, part) in zip(known[2], parts.items(), strict=True):
                if memory and overlap.may_wait(part, memory):
                    later.add(name, target, part)
                else:
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
            _write(file.descriptor, tensor_parts.content_of(part), place.offset)


def _write(descriptor: int, content: Any, offset: int) -> None:
    """Writes bytes at an offset. Raises OSError where there is no room."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written
