"""What one value is over all ranks.

Ranks that all run on one host tell each other (`same_host`), each thing by one exchange; others reduce by torch, on the
process group's own device: what a function says of collectives is for these.
Without a process group, or in one of its own, a rank is alone and asks nobody. torch is used when the script has loaded
it; this file never does. The timeout of a group has no public name in torch: `_get_backend`, `options._timeout`.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from ft_client.meeting import meet
from ft_client.same_host import PeerGone, PeerLate, SameHost

_HOW: dict[str, Callable[..., float]] = {"MAX": max, "MIN": min}


class _Ties:
    """What the ranks of one process group agree by; of the default group, which all ranks make anew together."""

    def __init__(self) -> None:
        self._group: Callable[[], Any] = lambda: None
        self._host: SameHost | None = None

    def host(self, dist: Any) -> SameHost | None:
        """The connections of ranks of one host; None: they are on several. Collective when the group is a new one."""
        group = dist.group.WORLD
        if self._group() is not group:
            self.drop()
            rank, size, device = dist.get_rank(), dist.get_world_size(), _device(dist)
            wait_s = _timeout_s(dist, group, device)
            self._host = meet(rank, size, wait_s, partial(_broadcast, dist), partial(_is_on_all, dist))
            self._group = weakref.ref(group)
        return self._host

    def cut(self) -> None:
        """Fails whoever waits in an agreement, here and in the peers."""
        if (host := self._host) is not None:
            host.cut()

    def drop(self) -> None:
        """Forgets the group. In a fork, the parent's connections stay as they are."""
        host, self._host, self._group = self._host, None, lambda: None
        if host is not None:
            host.close()


_ties = _Ties()
os.register_at_fork(after_in_child=_ties.drop)


def cut() -> None:
    """Fails whoever waits in a call of this file between ranks of one host, here and in the peers. From any thread."""
    _ties.cut()


def rank() -> int:
    """This rank in the group; 0 when alone."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def size() -> int:
    """How many ranks the group has; 1 when alone."""
    dist = _distributed()
    return 1 if dist is None else int(dist.get_world_size())


def reference() -> Callable[[], Any]:
    """A weak reference to the present group, of None when alone: whether two calls speak of the same ranks."""
    dist = _distributed()
    return (lambda: None) if dist is None else weakref.ref(dist.group.WORLD)


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """The maximum of each value over all ranks, by one all-reduce; every rank gives as many, in the same order."""
    return _reduced(values, "MAX")


def min_over_ranks(values: Sequence[float]) -> list[float]:
    """The minimum of each value over all ranks, by one all-reduce; every rank gives as many, in the same order."""
    return _reduced(values, "MIN")


def gather_on_rank0(values: Sequence[float]) -> list[list[float]] | None:
    """The values of all ranks by rank, by one gather; None on other ranks than 0. Every rank gives as many."""
    dist = _distributed()
    if dist is None:
        return [list(values)]
    if (host := _ties.host(dist)) is not None:
        gathered: list[list[float]] = []

        def keep(rows: list[bytes]) -> bytes:
            gathered.extend(map(_floats, rows))
            return b""

        _ask(dist, host, f"a gather of {len(values)}", _bytes(values), keep)
        return gathered if dist.get_rank() == 0 else None
    tensor = _tensor(dist, values)
    rows = [tensor.new_empty(tensor.shape) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, rows, dst=0)
    return None if rows is None else [row.tolist() for row in rows]


def from_rank0(value: float) -> float:
    """What rank 0 gives, on every rank, by one broadcast."""
    dist = _distributed()
    if dist is None:
        return value
    if (host := _ties.host(dist)) is not None:
        return _floats(_ask(dist, host, "a broadcast", _bytes([value]), lambda rows: rows[0]))[0]
    return _broadcast(dist, value)


def union_over_ranks(names: Iterable[str]) -> list[str]:
    """All names that any rank gives, sorted: one reduction of a length, one gathering of bytes."""
    own = sorted(set(names))
    dist = _distributed()
    if dist is None:
        return own
    text = json.dumps(own).encode()
    if (host := _ties.host(dist)) is not None:
        return list(json.loads(_ask(dist, host, "a union", text, lambda rows: json.dumps(_union(rows)).encode())))
    torch = sys.modules["torch"]
    length = int(max_over_ranks([len(text)])[0])
    tensor = torch.tensor(list(text.ljust(length)), dtype=torch.uint8, device=_device(dist))
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return _union([bytes(one.tolist()) for one in gathered])


def _union(texts: list[bytes]) -> list[str]:
    return sorted({name for text in texts for name in json.loads(text)})


def _reduced(values: Sequence[float], how: str) -> list[float]:
    dist = _distributed()
    if dist is None:
        return list(values)
    if (host := _ties.host(dist)) is None:
        return _all_reduced(dist, values, how)

    def reduced(rows: list[bytes]) -> bytes:
        return _bytes(map(_HOW[how], *map(_floats, rows)))

    return _floats(_ask(dist, host, f"the {how} of {len(values)}", _bytes(values), reduced))


def _ask(dist: Any, host: SameHost, question: str, own: bytes, answer: Callable[[list[bytes]], bytes]) -> bytes:
    """An exchange in which what peers do fails as in a collective."""
    try:
        return host.exchange(question, own, answer)
    except (PeerGone, PeerLate) as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(values: Iterable[float]) -> bytes:
    return array("d", values).tobytes()


def _floats(data: bytes) -> list[float]:
    return array("d", data).tolist()


def _all_reduced(dist: Any, values: Sequence[float], how: str) -> list[float]:
    tensor = _tensor(dist, values)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, how))
    return [float(value) for value in tensor.tolist()]


def _is_on_all(dist: Any, is_here: bool) -> bool:
    return _all_reduced(dist, [float(is_here)], "MIN")[0] > 0


def _broadcast(dist: Any, value: float) -> float:
    tensor = _tensor(dist, [value])
    dist.broadcast(tensor, src=0)
    return float(tensor.item())


def _tensor(dist: Any, values: Sequence[float]) -> Any:
    torch = sys.modules["torch"]
    return torch.tensor(list(values), dtype=torch.float64, device=_device(dist))


def _distributed() -> Any:
    """`torch.distributed` if this process is in a group with others."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist


def _timeout_s(dist: Any, group: Any, device: Any) -> float:
    """After which a collective of the group fails; torch's default where its backend does not say."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        timeout = dist.distributed_c10d.default_pg_timeout
    return float(timeout.total_seconds())


def _device(dist: Any) -> Any:
    """The device of the default group's backend."""
    return _device_of(str(dist.get_backend_config()))


@lru_cache(8)
def _device_of(backend_config: str) -> Any:
    """From a form like `cpu:gloo,cuda:nccl`: cpu when it serves that."""
    kinds = [pair.partition(":")[0] for pair in backend_config.split(",")]
    return sys.modules["torch"].device("cpu" if "cpu" in kinds else kinds[0])
