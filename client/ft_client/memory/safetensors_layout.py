"""Where each tensor lies in a file, and the file's header, in the layout of safetensors. Pure.

    8 bytes: length of the header | header: JSON, padded by spaces | the bytes of all tensors, without gaps

The header has an entry for each tensor, and `__metadata__`, which maps texts to texts. Ours has fixed room: the bytes
of the tensors begin at the same offset whatever the metadata say, so the tensors can be written before the checksum of
their bytes is known. The last entry, `PLAIN_STATE`, is the state that is no tensor, as bytes; it has fixed room too, so
that the size of a file does not change from save to save, and the metadata say how many of its bytes count.

Two checksums (CRC-32) are in the metadata: of all bytes behind the header, and of the header itself, computed while its
own place holds zeros.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rank_monitor.contract.wire.foreign import parse_json

PLAIN_STATE = "__plain_state__"
DATA_CHECKSUM = "data_crc32"
_PLAIN_BYTES = "plain_bytes"
_HEADER_CHECKSUM = "header_crc32"
_UNKNOWN = "00000000"
_LENGTH_BYTES = 8
_ALIGNMENT = 4096
"""The tensors begin on a page, so that a mapped tensor is as well aligned as one of torch's own."""
_SPARE = 512
"""Room for what may become longer from save to save: numbers in the metadata, and the room of the plain state."""
MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library, which refuses longer headers."""

ITEM_BYTES: Mapping[str, int] = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8},
}
"""Name of a type in safetensors -> bytes of one element."""


class DamagedFile(Exception):
    """The bytes are not those that were written. The text says what is wrong."""


class HeaderTooLong(Exception):
    """No reader would accept the header. The text says how long it is."""


@dataclass(frozen=True)
class TensorSpec:
    """What the header says of a tensor. `kind`: a key of `ITEM_BYTES`."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return ITEM_BYTES[self.kind] * math.prod(self.shape)


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor and the offset of its first byte in the file."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class FileLayout:
    """Where everything lies in a file.

    Attributes:
        tensors: name -> place, in the order of the file.
        data_offset: of the first byte behind the header.
        tensors_end: offset behind the last tensor; the plain state begins there.
        plain_room: bytes of the plain state at most.
    """

    tensors: Mapping[str, PlacedTensor]
    data_offset: int
    tensors_end: int
    plain_room: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.tensors_end + self.plain_room


def plan(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], plain_room: int) -> FileLayout:
    """Returns where each tensor lies. Tensors with large elements come first, so each is aligned to its elements.

    Args:
        specs: name -> what is to be stored.
        metadata: as for `header`; a later header has room for values that are longer by a few hundred characters in
            all.
        plain_room: bytes of the plain state at most.

    Raises:
        HeaderTooLong: there are too many tensors, or their names are too long.
    """
    ordered = sorted(specs.items(), key=lambda item: -ITEM_BYTES[item[1].kind])
    known = {**metadata, DATA_CHECKSUM: _UNKNOWN, _PLAIN_BYTES: str(plain_room)}
    end = sum(spec.size for spec in specs.values())
    text = _header_text(FileLayout(_entries(ordered, 0), 0, end, plain_room), known)
    data_offset = -(-(_LENGTH_BYTES + len(text) + _SPARE) // _ALIGNMENT) * _ALIGNMENT
    if data_offset - _LENGTH_BYTES > MAX_HEADER_BYTES:
        raise HeaderTooLong(f"the header would have {data_offset} bytes, and {MAX_HEADER_BYTES} are the most")
    return FileLayout(_entries(ordered, data_offset), data_offset, data_offset + end, plain_room)


def header(layout: FileLayout, metadata: Mapping[str, str], plain_bytes: int, data_checksum: int) -> bytes:
    """Returns the first bytes of the file, up to `layout.data_offset`.

    Args:
        layout: of the file.
        metadata: names -> texts.
        plain_bytes: how many bytes of the plain state count.
        data_checksum: of all bytes behind the header.

    Raises:
        ValueError: the metadata became too long for the header's room.
    """
    known = {**metadata, DATA_CHECKSUM: f"{data_checksum:08x}", _PLAIN_BYTES: str(plain_bytes)}
    text = _header_text(layout, known)
    room = layout.data_offset - _LENGTH_BYTES
    if len(text) > room:
        raise ValueError(f"the header has {len(text)} bytes, and there is room for {room}")
    padded = text.ljust(room)
    return room.to_bytes(_LENGTH_BYTES, "little") + _with_checksum(padded, zlib.crc32(padded))


@dataclass(frozen=True)
class ParsedHeader:
    """What a file says of itself.

    Attributes:
        metadata: names -> texts.
        tensors: name -> place, without the plain state.
        plain_state: offset of its first byte, and of the byte behind it.
        data_offset: of the first byte behind the header.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, PlacedTensor]
    plain_state: tuple[int, int]
    data_offset: int


def header_bytes(beginning: bytes, file_bytes: int) -> int:
    """Returns how many bytes a file's header has, its length's own bytes included.

    Args:
        beginning: the first bytes of the file, at least 8.
        file_bytes: the size of the file.

    Raises:
        DamagedFile: the length cannot be right.
    """
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if len(beginning) < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise DamagedFile("the length of its header cannot be right")
    return _LENGTH_BYTES + length


def parse(beginning: bytes, file_bytes: int) -> ParsedHeader:
    """Returns what a header says, after a check of its checksum and of all offsets.

    Args:
        beginning: the header, with its length before it.
        file_bytes: the size of the file.

    Raises:
        DamagedFile: the header is not one that was written here, or it names bytes that are not in the file.
    """
    text = beginning[_LENGTH_BYTES:]
    _verify_checksum(text)
    try:
        entries = parse_json(text)
        metadata = entries.pop("__metadata__")
        places = {name: _place(entry, len(beginning)) for name, entry in entries.items()}
        plain = places.pop(PLAIN_STATE)
        plain_bytes = int(metadata[_PLAIN_BYTES])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
        raise DamagedFile(f"its header is not one of ours ({type(problem).__name__})") from None
    end = max(place.offset + place.spec.size for place in (plain, *places.values()))
    if end != file_bytes:
        raise DamagedFile(f"it has {file_bytes} bytes, and its header says {end}")
    return ParsedHeader(metadata, places, (plain.offset, plain.offset + plain_bytes), len(beginning))


def _place(entry: Mapping[str, Any], data_offset: int) -> PlacedTensor:
    """Returns the place of a tensor. Raises ValueError and the like where the entry is not consistent."""
    spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
    begin, end = entry["data_offsets"]
    if begin < 0 or end - begin != spec.size:
        raise ValueError("the offsets do not fit the shape")
    return PlacedTensor(spec, data_offset + begin)


def _entries(ordered: Sequence[tuple[str, TensorSpec]], offset: int) -> dict[str, PlacedTensor]:
    """Returns the places of tensors that follow each other from `offset` on."""
    places = {}
    for name, spec in ordered:
        places[name] = PlacedTensor(spec, offset)
        offset += spec.size
    return places


def _header_text(layout: FileLayout, metadata: Mapping[str, str]) -> bytes:
    """Returns the JSON of a header, with zeros in the place of its own checksum, which comes first."""
    entries: dict[str, Any] = {"__metadata__": {_HEADER_CHECKSUM: _UNKNOWN, **metadata}}
    for name, place in layout.tensors.items():
        entries[name] = _entry(place, layout.data_offset)
    plain = PlacedTensor(TensorSpec("U8", (layout.plain_room,)), layout.tensors_end)
    entries[PLAIN_STATE] = _entry(plain, layout.data_offset)
    return json.dumps(entries, separators=(",", ":")).encode()


def _entry(place: PlacedTensor, data_offset: int) -> dict[str, Any]:
    """Returns the JSON of one tensor: offsets count from the first byte behind the header."""
    begin = place.offset - data_offset
    return {"dtype": place.spec.kind, "shape": place.spec.shape, "data_offsets": [begin, begin + place.spec.size]}


_BEFORE_CHECKSUM = f'{{"__metadata__":{{"{_HEADER_CHECKSUM}":"'.encode()


def _with_checksum(text: bytes, checksum: int) -> bytes:
    """Returns a header's text with `checksum` in its place."""
    behind = len(_BEFORE_CHECKSUM) + len(_UNKNOWN)
    return _BEFORE_CHECKSUM + f"{checksum:08x}".encode() + text[behind:]


def _verify_checksum(text: bytes) -> None:
    """Raises DamagedFile unless the header's text has the checksum that it names."""
    behind = len(_BEFORE_CHECKSUM) + len(_UNKNOWN)
    named = text[len(_BEFORE_CHECKSUM) : behind]
    computed = zlib.crc32(_BEFORE_CHECKSUM + _UNKNOWN.encode() + text[behind:])
    if not text.startswith(_BEFORE_CHECKSUM) or named != f"{computed:08x}".encode():
        raise DamagedFile("the checksum of its header is wrong")
