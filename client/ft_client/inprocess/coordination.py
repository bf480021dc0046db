"""Where the ranks of a call meet: two connections to a store that lives in no rank, and what to be told apart by.

Under the launcher that is the store of the cycle, which a node agent hosts. Elsewhere it is the user's, or one that the
companion of rank 0 hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ft_client.inprocess import connections
from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.store import PrefixStore, TCPStore, address
from rank_monitor.contract import env
from rank_monitor.contract.roll import Store

logger = logging.getLogger("ft_client.inprocess")

_BASE = "in_process"
_calls = 0


@dataclass(frozen=True)
class Coordination:
    """What one call works with.

    `store` and `watched` are the call's keys through two connections, since a thread that waits blocks its own.
    `prefix`: of these keys, where the launcher can reach them; else empty. `towards`: where the ranks' hosts see each
    other; None: there is only one host. `kept`: what must live as long as the stores.
    """

    store: Any
    watched: Any
    prefix: str
    towards: tuple[str, int] | None
    kept: tuple[Any, ...] = field(default=(), repr=False)


def is_launched() -> bool:
    """Whether this rank was started by the launcher, whose agent hosts a store for it."""
    return all(name in os.environ for name in (env.JOB_TAG, env.RANK_MONITOR_SOCKET, "MASTER_ADDR", "MASTER_PORT"))


def meet(arguments: Arguments) -> Coordination:
    """Connects to the store of the next call. Every rank makes the same calls in the same order.

    Raises:
        ValueError: the address of the store is not known.
        RuntimeError: what the store raises when it cannot be reached.
    """
    global _calls
    towards = None
    launched = is_launched() and arguments.store_factory is TCPStore
    if launched:
        if ignored := {"host_name", "port"} & set(arguments.store_kwargs):
            logger.info("store_kwargs %s are not used: the launcher hosts the store", sorted(ignored))
        raw = _connect(arguments, {"host_name": None, "port": None})
    else:
        raw = _connect(arguments, {})
    if isinstance(raw, TCPStore):
        connections.spare(raw.port)
        towards = address(*((None, None) if launched else _given(arguments.store_kwargs)))
    base = _BASE if launched else f"{_BASE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    number = int(raw.get(f"{base}/call")) if is_respawned() and raw.check([f"{base}/call"]) else _calls
    _calls = number + 1
    prefix = f"{base}/{number}"
    second = _second(raw, arguments)
    raw.set_timeout(arguments.barrier_timeout)
    if os.environ.get("RANK") == "0":
        raw.set(f"{base}/call", str(number))
    store, watched = PrefixStore(prefix, raw), PrefixStore(prefix, second)
    return Coordination(store, watched, prefix if launched else "", towards, (raw, second))


def is_respawned() -> bool:
    """Whether the launcher started this rank again alone, while the others went on."""
    return env.REJOIN in os.environ


def _given(kwargs: Mapping[str, Any]) -> tuple[str | None, int | None]:
    return kwargs.get("host_name"), kwargs.get("port")


def _connect(arguments: Arguments, more: dict[str, Any]) -> Any:
    return arguments.store_factory(**{**arguments.store_kwargs, **more})


def _second(raw: Any, arguments: Arguments) -> Store:
    """Another connection to the same store."""
    with contextlib.suppress(NotImplementedError, RuntimeError, AttributeError):
        clone: Store = raw.clone()
        return clone
    made: Store = _connect(arguments, {})
    return made
