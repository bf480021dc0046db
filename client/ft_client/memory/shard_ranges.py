"""Which part of which shard goes where, when a DTensor is put together by a job with another number of ranks. Pure.

A *box* is a block of a tensor: where it begins and ends in each dimension. The shard of a rank is a box of the whole
tensor. Where an old shard and a new one overlap, their overlap is a box of each of them, which is a *piece* to copy.

torch splits a dimension as `torch.chunk` does: all shards are as large as the first one, but for the last ones, which
are smaller or empty. Where two dimensions of a mesh split the same dimension of a tensor, the first one splits first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Box = tuple[tuple[int, int], ...]
"""Begin and end in each dimension of a tensor; one of no dimension has an empty box, which holds one element."""

_SHARD = re.compile(r"Shard\(dim=(-?\d{1,3})\)")
_REPLICATE = "Replicate()"


class CannotReshard(Exception):
    """The shards of an old job cannot be put together for this one. The text names the tensor and the reason."""


@dataclass(frozen=True)
class Layout:
    """How a tensor is spread over ranks.

    Attributes:
        shape: of the whole tensor.
        mesh: the numbers of the ranks, as nested lists: one level for each dimension of the mesh.
        split: for each dimension of the mesh the dimension of the tensor that it splits; None: all have the same.
    """

    shape: tuple[int, ...]
    mesh: Any
    split: tuple[int | None, ...]


@dataclass(frozen=True)
class Piece:
    """A block to copy.

    Attributes:
        source: the old rank whose shard has it.
        source_box: in this shard.
        target_box: in the new shard.
    """

    source: int
    source_box: Box
    target_box: Box


def split_of(name: str, placements: Sequence[str], dims: int) -> tuple[int | None, ...]:
    """Returns which dimension of a tensor each dimension of a mesh splits.

    Args:
        name: of the tensor, for the error.
        placements: as torch's `repr` writes them.
        dims: of the tensor.

    Raises:
        CannotReshard: a placement is neither `Shard` nor `Replicate`. A `_StridedShard` is in an order that only its
            own mesh knows, and a `Partial` is a sum that was not made yet.
    """
    found: list[int | None] = []
    for text in placements:
        shard = _SHARD.fullmatch(text)
        if shard is not None and -dims <= int(shard[1]) < dims:
            found.append(int(shard[1]) % dims)
        elif text == _REPLICATE:
            found.append(None)
        else:
            raise CannotReshard(f"{name} has the placement {text}, which only as many ranks as before can load")
    return tuple(found)


def boxes(layout: Layout) -> dict[int, Box]:
    """Returns the shard of each rank of a mesh, as a box of the whole tensor."""
    found = {}
    for rank, place, sizes in _places(layout.mesh):
        box = [(0, size) for size in layout.shape]
        for index, size, dim in zip(place, sizes, layout.split, strict=True):
            if dim is not None:
                box[dim] = _chunk(box[dim], index, size)
        found[rank] = tuple(box)
    return found


def pieces(name: str, old: Mapping[int, Box], target: Box, available: Sequence[int]) -> list[Piece]:
    """Returns the blocks of which a new shard is put together: they do not overlap, and nothing is missing.

    Args:
        name: of the tensor, for the error.
        old: old rank -> its shard.
        target: the new shard.
        available: old ranks whose files are there. Of ranks that had the same shard the first one is used.

    Raises:
        CannotReshard: a part of the new shard is in no file that is there.
    """
    if not volume(target):
        return []
    used: dict[Box, int] = {}
    for rank in available:
        if rank in old:
            used.setdefault(old[rank], rank)
    found = []
    for box, rank in used.items():
        both = _overlap(box, target)
        if volume(both):
            found.append(Piece(rank, _relative(both, box), _relative(both, target)))
    if sum(volume(piece.target_box) for piece in found) != volume(target):
        missing = [rank for rank, box in sorted(old.items()) if box not in used and volume(_overlap(box, target))]
        ranks = ", ".join(map(str, missing)) or "no rank"
        raise CannotReshard(f"a part of {name} is missing, which was written by: {ranks}")
    return found


def chunks(piece: Piece, item_bytes: int, max_bytes: int) -> Iterator[Piece]:
    """Yields a piece as smaller ones of at most `max_bytes` each, or of one element. Each is cut from the next in the
    first dimension that has more than one index, so it has long runs of bytes.

    `item_bytes`: of one element.
    """
    extents = [end - begin for begin, end in piece.source_box]
    if math.prod(extents) * item_bytes <= max_bytes or max(extents, default=1) <= 1:
        yield piece
        return
    dim = next(index for index, extent in enumerate(extents) if extent > 1)
    row_bytes = math.prod(extents) // extents[dim] * item_bytes
    step = max(1, max_bytes // row_bytes)
    for begin in range(0, extents[dim], step):
        end = min(begin + step, extents[dim])
        part = Piece(piece.source, _cut(piece.source_box, dim, begin, end), _cut(piece.target_box, dim, begin, end))
        yield from chunks(part, item_bytes, max_bytes)


def volume(box: Box) -> int:
    """Returns how many elements a box has."""
    return math.prod(max(0, end - begin) for begin, end in box)


def extents(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(end - begin for begin, end in box)


def _chunk(whole: tuple[int, int], index: int, count: int) -> tuple[int, int]:
    """Returns where one of `count` chunks of a dimension begins and ends."""
    begin, end = whole
    size = -(-(end - begin) // count)
    return min(begin + index * size, end), min(begin + (index + 1) * size, end)


def _places(mesh: Any) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields each rank of a mesh, its index in each dimension, and the sizes of these."""
    if not isinstance(mesh, list):
        yield mesh, (), ()
        return
    for index, inner in enumerate(mesh):
        for rank, place, sizes in _places(inner):
            yield rank, (index, *place), (len(mesh), *sizes)


def _overlap(one: Box, other: Box) -> Box:
    """Returns the box that two boxes have in common; an end may lie before its begin where there is none."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _relative(box: Box, whole: Box) -> Box:
    """Returns a box as one of `whole`, in which it lies."""
    return tuple((begin - start, end - start) for (begin, end), (start, _) in zip(box, whole, strict=True))


def _cut(box: Box, dim: int, begin: int, end: int) -> Box:
    """Returns a part of a box, of some indices of one dimension, which count from the box's own begin."""
    start = box[dim][0]
    return (*box[:dim], (start + begin, start + end), *box[dim + 1 :])
