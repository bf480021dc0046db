"""What a rank of a test asks the others: each collective is counted and happens as ever."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

COLLECTIVES = ("all_reduce", "gather", "all_gather", "broadcast", "barrier", "all_gather_object")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Kind and size of each collective: numbers of an all-reduce or a gather, 0 of others."""
    found: list[tuple[str, int]] = []

    def collective(kind: str, real: Callable[..., Any], tensor: Any = None, *args: Any, **more: Any) -> Any:
        found.append((kind, tensor.numel() if kind in ("all_reduce", "gather") else 0))
        return real(tensor, *args, **more)

    with contextlib.ExitStack() as stack:
        for kind in COLLECTIVES:
            real = getattr(dist, kind)
            stack.enter_context(mock.patch.object(dist, kind, functools.partial(collective, kind, real)))
        yield found
