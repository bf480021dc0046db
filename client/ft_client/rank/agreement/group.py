"""One value over all ranks of the default process group, by torch's collectives on the group's own device.

A *collective* function must be called by all ranks of the group, in the same order; it blocks until they have, and then
returns the same on all (`gather_on_rank0` on rank 0). Without a process group, or in a group of its own, a rank is
alone and asks nobody.

torch is used when the script has loaded it; this file never loads it. Numbers travel as float64, so whole numbers are
exact up to 2**53.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

_last: deque[Any] = deque(maxlen=8)
"""The tensors of the last collectives, which are kept alive here. With torch 2.6, a group of gloo that ends right after
a collective whose tensor is gone hangs (all-reduce: 7 of 8 runs; gather: 2 of 2): a thread of the group frees the
tensor, and needs the GIL for that. With forty processes that wanted to run, that thread was several collectives
late."""


def rank() -> int:
    """Returns the number of this rank in the group; 0 when alone. Asks no other rank."""
    dist = _distributed()
    if dist is None:
        return 0
    return int(dist.get_rank())


def size() -> int:
    """Returns how many ranks the group has; 1 when alone. Asks no other rank."""
    dist = _distributed()
    if dist is None:
        return 1
    return int(dist.get_world_size())


def is_there() -> bool:
    """Returns whether this process has a default process group, with others or of its own. Asks no other rank."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Returns the maximum of each value over all ranks. Collective: one all-reduce. Every rank gives as many values."""
    return _reduced(values, "MAX")


def min_over_ranks(values: Sequence[float]) -> list[float]:
    """Returns the minimum of each value over all ranks. Collective: one all-reduce. Every rank gives as many values."""
    return _reduced(values, "MIN")


def range_over_ranks(values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns the minimum and the maximum of each value over all ranks. Collective: one all-reduce. Every rank gives as
    many values."""
    found = max_over_ranks([*values, *(-value for value in values)])
    return [(-negative, high) for high, negative in zip(found[: len(values)], found[len(values) :], strict=True)]


def gather_on_rank0(values: Sequence[float]) -> list[list[float]] | None:
    """Returns the values of all ranks, by rank; None on other ranks than 0. Collective: one gather. Every rank gives as
    many values."""
    dist = _distributed()
    if dist is None:
        return [list(values)]
    tensor = _kept(_tensor(dist, values))
    if dist.get_rank() == 0:
        rows = [tensor.new_empty(tensor.shape) for _ in range(dist.get_world_size())]
        _kept([tensor, *rows])
    else:
        rows = None
    dist.gather(tensor, rows, dst=0)
    if rows is None:
        return None
    return [row.tolist() for row in rows]


def from_rank0(value: float) -> float:
    """Returns on every rank what rank 0 gives. Collective: one broadcast."""
    dist = _distributed()
    if dist is None:
        return value
    tensor = _kept(_tensor(dist, [value]))
    dist.broadcast(tensor, src=0)
    return float(tensor.item())


def union_over_ranks(names: Iterable[str]) -> list[str]:
    """Returns all names that any rank gives, sorted. Collective, as `gather_json`."""
    return sorted({name for row in gather_json(sorted(set(names))) for name in row})


def gather_json(value: Any) -> list[Any]:
    """Returns what each rank gives, by rank, on every rank. Collective: one all-reduce of a length, one all-gather of
    bytes.

    `value`: what JSON can hold. Tuples come back as lists.
    """
    text = json.dumps(value).encode()
    dist = _distributed()
    if dist is None:
        return [json.loads(text)]
    torch = sys.modules["torch"]
    length = int(max_over_ranks([len(text)])[0])
    tensor = torch.tensor(list(text.ljust(length)), dtype=torch.uint8, device=device())
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    _kept([tensor, *gathered])
    dist.all_gather(gathered, tensor)
    return [json.loads(bytes(row.tolist())) for row in gathered]


def _reduced(values: Sequence[float], operation: str) -> list[float]:
    dist = _distributed()
    if dist is None:
        return list(values)
    tensor = _kept(_tensor(dist, values))
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
    return [float(value) for value in tensor.tolist()]


def _kept(tensors: Any) -> Any:
    """Returns the tensors of a collective, and keeps them alive during the next few; see `_last`."""
    _last.append(tensors)
    return tensors


def _tensor(dist: Any, values: Sequence[float]) -> Any:
    torch = sys.modules["torch"]
    return torch.tensor(list(values), dtype=torch.float64, device=device())


def _distributed() -> Any:
    """Returns `torch.distributed` if this process is in a group with others; otherwise None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist


def device() -> Any:
    """Returns the device (`torch.device`) whose tensors the default group can reduce. There must be a group."""
    return _device_of(str(sys.modules["torch.distributed"].get_backend_config()))


@lru_cache(8)
def _device_of(backend_config: str) -> Any:
    """Returns the device for a group with such backends, `cpu:gloo,cuda:nccl` for example: cpu if the group serves
    it."""
    kinds = [pair.partition(":")[0] for pair in backend_config.split(",")]
    if "cpu" in kinds:
        kind = "cpu"
    else:
        kind = kinds[0]
    return sys.modules["torch"].device(kind)
