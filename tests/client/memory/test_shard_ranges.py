"""Shards of any job, put together for any other one, are those of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_client.memory import shard_ranges
from ft_client.memory.shard_ranges import Box, CannotReshard, Layout, boxes, chunks, pieces, split_of


def mesh_of(sizes: Sequence[int]) -> Any:
    return torch.arange(math.prod(sizes)).view(list(sizes)).tolist()


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    placements: Any = st.none()
    if shape:
        placements = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    found = []
    for _ in range(2):
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
        split = tuple(draw(placements) for _ in sizes)
        found.append(Layout(shape, mesh_of(sizes), split))
    return found[0], found[1]


def block(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(begin, end) for begin, end in box)]


@given(layouts=two_layouts(), max_bytes=st.integers(1, 64), seed=st.randoms(use_true_random=False))
def test_all_new_shards_are_those_of_the_whole_tensor(
    layouts: tuple[Layout, Layout], max_bytes: int, seed: Any
) -> None:
    old_layout, new_layout = layouts
    whole = torch.arange(math.prod(old_layout.shape)).view(old_layout.shape)
    old = boxes(old_layout)
    shards = {rank: block(whole, box).clone() for rank, box in old.items()}
    for target in boxes(new_layout).values():
        available = list(old)
        seed.shuffle(available)
        expected = block(whole, target)
        found = torch.full(shard_ranges.extents(target), -1)
        for piece in pieces("weight", old, target, available):
            for chunk in chunks(piece, 8, max_bytes):
                size = shard_ranges.volume(chunk.source_box)
                assert size * 8 <= max_bytes or size == 1
                part = block(found, chunk.target_box)
                assert (part == -1).all(), "written twice"
                part.copy_(block(shards[chunk.source], chunk.source_box))
        assert torch.equal(found, expected)


@given(size=st.integers(1, 40), ranks=st.integers(1, 9))
def test_shards_are_those_of_torch(size: int, ranks: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(size).chunk(ranks)]
    expected += [0] * (ranks - len(expected))
    found = boxes(Layout((size,), list(range(ranks)), (0,)))
    assert [end - begin for ((begin, end),) in found.values()] == expected


def test_a_shard_that_is_in_no_file_is_named_with_its_rank() -> None:
    old = boxes(Layout((8,), [0, 1, 2, 3], (0,)))
    with pytest.raises(CannotReshard, match="a part of weight is missing, which was written by: 2"):
        pieces("weight", old, ((4, 8),), [0, 1, 3])


def test_of_two_ranks_with_the_same_shard_one_is_enough() -> None:
    old = boxes(Layout((4,), [[0, 1], [2, 3]], (None, 0)))
    assert [piece.source for piece in pieces("weight", old, ((0, 4),), [2, 1])] == [2, 1]


@pytest.mark.parametrize("text", ["_StridedShard(dim=0, sf=2)", "Partial(sum)", "Shard(dim=2)", "Shard(dim=x)"])
def test_what_cannot_be_put_together_is_refused_by_name(text: str) -> None:
    with pytest.raises(CannotReshard, match=r"model\.weight has the placement"):
        split_of("model.weight", ["Replicate()", text], 2)


def test_placements() -> None:
    assert split_of("weight", ["Shard(dim=1)", "Replicate()", "Shard(dim=-2)"], 2) == (1, None, 0)
