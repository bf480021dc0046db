"""Failures in a row: how long they last, when they are said, and which of them says that this node has no network."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from torch.distributed import HashStore

from ft_launcher.job.link.connections import Connections, Failures
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.errors import StoreLost


@pytest.mark.parametrize(
    ("times", "lasted_s", "said"),
    [
        ([(0, 0)], 0, [0]),
        ([(0, 0), (1, 1)], 1, [0, 1]),
        ([(at, at) for at in range(0, 130, 10)], 120, [0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]),
        ([(0, 0), (1, 20)], 0, [0, 0]),
        ([(0, 0), (1, 20), (21, 21)], 1, [0, 0, 1]),
    ],
    ids=["one", "two", "for minutes", "a wait that was cut", "failures after a wait"],
)
def test_what_fails_at_once_again_and_again(times: list[tuple[int, int]], lasted_s: int, said: list[int]) -> None:
    failures = Failures(soon_s=2)
    assert [int(failures.failed(began, now, "why")) for began, now in times] == said
    assert failures.lasted_s == lasted_s
    failures.worked()
    assert failures.lasted_s == 0


class _SaysUnreachable(RuntimeError):
    """An error of the store's server whose text alone speaks of a network."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)), True),
        (OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN)), True),
        (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (TimeoutError("timed out"), False),
        (_SaysUnreachable("the key 'unreachable' is not there"), False),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["itself", "wrapped"])
def test_no_route(error: Exception, expected: bool, is_wrapped: bool) -> None:

    def connect() -> tuple[Any, Any]:
        if not is_wrapped:
            raise error
        try:
            raise error
        except Exception:
            raise RuntimeError("as a client of HTTP turns it into its own")  # noqa: B904 (as its context)

    connections = Connections(JobStore(None, HashStore(), connect, "job", False), pause_s=0.1)
    assert not connections.has_no_route()
    with pytest.raises(StoreLost):
        connections.once(lambda store: None, "work", connections.waits)
    assert connections.has_no_route() == expected
