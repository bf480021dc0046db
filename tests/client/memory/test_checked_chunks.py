"""Blocks with checksums: what arrives otherwise than it was sent is never taken."""

from __future__ import annotations

import pytest
import torch

from ft_client.memory import checked_chunks
from ft_client.memory.safetensors_layout import DamagedFile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_a_block_comes_back(dtype: torch.dtype) -> None:
    block = torch.arange(12).view(3, 4).to(dtype)[:, 1:3]
    size = block.numel() * dtype.itemsize
    received = checked_chunks.without_checksum(checked_chunks.with_checksum(block, size))
    assert torch.equal(received.view(dtype).view(block.shape), block)


def test_a_single_number() -> None:
    received = checked_chunks.without_checksum(checked_chunks.with_checksum(torch.tensor(7.0), 4))
    assert received.view(torch.float32).tolist() == [7.0]


@pytest.mark.parametrize("place", [0, 11, 12, 15])
def test_a_flipped_bit_is_found(place: int) -> None:
    packed = checked_chunks.with_checksum(torch.arange(3, dtype=torch.float32), 12)
    packed[place] ^= 1
    with pytest.raises(DamagedFile):
        checked_chunks.without_checksum(packed)


@pytest.mark.parametrize("size", [1, 12])
def test_a_rank_that_cannot_send_sends_what_nobody_takes(size: int) -> None:
    with pytest.raises(DamagedFile):
        checked_chunks.without_checksum(checked_chunks.with_checksum(None, size))
