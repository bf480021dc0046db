"""What a rank of a test asks the others: each agreement is counted and happens as ever, by sockets or by torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from ft_client import group
from ft_client.same_host import SameHost

NUMBER = 8  # bytes
COLLECTIVES = ("all_reduce", "gather", "all_gather", "broadcast", "barrier", "all_gather_object")


@contextlib.contextmanager
def counted(one_host: bool) -> Iterator[list[tuple[str, int]]]:
    """Kind and size of each agreement: numbers of an all-reduce or a gather, 0 of others. Collective.

    Args:
        one_host: as all these ranks are; False: as if rank 0 could not be reached from elsewhere.
    """
    found: list[tuple[str, int]] = []
    exchange = SameHost.exchange

    def exchanged(host: SameHost, question: str, own: bytes, answer: Callable[[list[bytes]], bytes]) -> bytes:
        kind = next(name for word, name in WORDS.items() if word in question)
        found.append((kind, len(own) // NUMBER if kind in ("all_reduce", "gather") else 0))
        return exchange(host, question, own, answer)

    def collective(kind: str, real: Callable[..., Any], tensor: Any = None, *args: Any, **more: Any) -> Any:
        found.append((kind, tensor.numel() if kind in ("all_reduce", "gather") else 0))
        return real(tensor, *args, **more)

    group._ties.drop()
    with contextlib.ExitStack() as stack:
        if one_host:
            group.max_over_ranks([0.0])  # who is here is found out before anything is counted
            stack.enter_context(mock.patch.object(SameHost, "exchange", exchanged))
        else:
            stack.enter_context(mock.patch.object(group, "meet", lambda *_: None))
            stack.callback(group._ties.drop)
        for kind in COLLECTIVES:
            real = getattr(dist, kind)
            stack.enter_context(mock.patch.object(dist, kind, functools.partial(collective, kind, real)))
        yield found


WORDS = {"MAX": "all_reduce", "MIN": "all_reduce", "gather": "gather", "broadcast": "broadcast", "union": "all_gather"}
