"""Blocks of tensors from rank to rank, each with a checksum. Both sides know the size of each block before.

A rank that cannot send what it should sends a block that no receiver takes: the others wait for it, and its reason is
told in the vote that follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ft_client.memory import checksum
from ft_client.memory.safetensors_layout import DamagedFile
from ft_client.rank.agreement import group

MAX_BYTES = 16 << 20
"""Of one block: large enough that its start costs nothing beside it, small beside the memory of a rank."""
_CHECKSUM_BYTES = 4


def send(block: Any, size: int, target: int) -> None:
    """Sends a block to a rank. Blocks until that rank has called `receive`.

    Args:
        block: a plain tensor of at most `MAX_BYTES`; None: this rank cannot send it.
        size: bytes of the block.
        target: the rank.
    """
    dist.send(with_checksum(block, size).to(group.device()), dst=target)


def receive(size: int, source: int) -> Any:
    """Returns the bytes of a block, as a tensor of uint8. `size`: bytes. `source`: the rank that sends it.

    Raises:
        DamagedFile: they are not those that were sent, or the rank could not send them.
    """
    packed = torch.empty(size + _CHECKSUM_BYTES, dtype=torch.uint8, device=group.device())
    dist.recv(packed, src=source)
    return without_checksum(packed)


def broadcast(block: Any, size: int, source: int) -> Any:
    """Returns the bytes of a block that one rank has, on all ranks. Collective.

    Args:
        block: on the source a plain tensor, or None: it cannot send it. On others of no effect.
        size: bytes of the block.
        source: the rank that sends it.

    Raises:
        DamagedFile: as in `receive`.
    """
    if group.rank() == source:
        packed = with_checksum(block, size).to(group.device())
    else:
        packed = torch.empty(size + _CHECKSUM_BYTES, dtype=torch.uint8, device=group.device())
    dist.broadcast(packed, src=source)
    return without_checksum(packed)


def broadcast_bytes(content: bytes, source: int) -> bytes:
    """Returns on all ranks what one rank gives. Collective; every rank takes part in all blocks, whatever fails.

    Raises:
        DamagedFile: as in `receive`.
    """
    if group.rank() != source:
        content = b""
    total = int(group.max_over_ranks([len(content)])[0])
    problem: DamagedFile | None = None
    found = []
    for begin in range(0, total, MAX_BYTES):
        size = min(MAX_BYTES, total - begin)
        block = None
        if group.rank() == source:
            block = torch.frombuffer(bytearray(content[begin : begin + size]), dtype=torch.uint8)
        try:
            found.append(bytes(broadcast(block, size, source).numpy()))
        except DamagedFile as damaged:
            problem = damaged
    if problem is not None:
        raise problem
    return b"".join(found)


def with_checksum(block: Any, size: int) -> Any:
    """Returns a block with its checksum behind it, as one tensor of uint8 in the host's memory."""
    packed = torch.zeros(size + _CHECKSUM_BYTES, dtype=torch.uint8)
    if block is not None:
        packed[:size] = block.contiguous().view(-1).view(torch.uint8)
    computed = checksum.crc32(packed[:size].numpy())
    if block is None:
        computed ^= 1  # no receiver takes it
    packed[size:] = torch.frombuffer(bytearray(computed.to_bytes(_CHECKSUM_BYTES, "little")), dtype=torch.uint8)
    return packed


def without_checksum(packed: Any) -> Any:
    """Returns the block in what `with_checksum` has made. Raises DamagedFile."""
    here = packed.cpu()
    block = here[:-_CHECKSUM_BYTES]
    named = int.from_bytes(bytes(here[-_CHECKSUM_BYTES:].numpy()), "little")
    if checksum.crc32(block.numpy()) != named:
        raise DamagedFile("a block did not arrive as it was written, or its rank could not send it")
    return block
