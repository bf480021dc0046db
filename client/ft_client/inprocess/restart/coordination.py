"""Connects a rank to the store of a call, which is not in any rank, and provides for reports about a dead rank.

Under the launcher the store is that of the cycle: a node agent hosts it, and reports the deaths of its ranks. Elsewhere
each rank has a companion, and that of rank 0 hosts the store, unless an agent of torchrun or the user does. Agent or
companion also serve a store for each round; a rank does so only where neither can. A rank that was started again
alone joins the call here.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ft_client.inprocess import gloo_connections
from ft_client.inprocess.arguments import Arguments, path_of
from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.standalone.companion import Companion
from ft_client.inprocess.standalone.store_host import own_address
from ft_client.inprocess.standalone.watched_call import WatchedCall
from ft_client.inprocess.state import State
from ft_client.inprocess.store import PrefixStore, TCPStore, address
from ft_client.rank.monitoring import process
from rank_monitor.contract import env
from rank_monitor.contract.processes import peer_names
from rank_monitor.contract.rounds.barrier import Entry, Store
from rank_monitor.contract.rounds.round import Closed, Round, closing_of, current, joining
from rank_monitor.contract.wire.own_file import open_own

logger = logging.getLogger("ft_client.inprocess")

_BASE = "in_process"
_USES_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
_NOW = "now"
"""The value of `--ft-rejoin` with which a rank that was started again interrupts the others' round."""
_calls = 0

Address = tuple[str, int]


@dataclass(frozen=True)
class Coordination:
    """The stores and the companion of one call.

    `store` and `watched` are the call's keys through two connections, since a wait blocks its connection for other
    threads. `prefix`: of these keys, where the launcher can reach them; else empty. `towards`: an address by which the
    ranks' hosts reach each other; None: there is only one host. `is_served`: the stores of rounds are served by a
    process that is not a rank. `logfile`: where this rank's monitor is to write; empty: nowhere, or it does already.
    `kept`: objects that must live as long as the stores.
    """

    store: Any
    watched: Any
    prefix: str
    towards: Address | None
    companion: Companion | None
    is_served: bool
    logfile: str = ""
    kept: tuple[Any, ...] = field(default=(), repr=False)

    def must_serve(self, state: State) -> bool:
        """Whether this rank has to serve the store of its iteration: as the first active rank, where no other process
        does; or as the one whose companion did, if that is lost."""
        if not self.is_served:
            return state.active_rank == 0
        return state.initial_rank == 0 and self.companion is not None and self.companion.is_lost

    def close(self) -> None:
        """Ends the call for this rank."""
        if self.companion is not None:
            self.companion.close()


def is_launched() -> bool:
    """Whether this rank was started by the launcher, whose agent hosts a store for it."""
    return all(name in os.environ for name in (env.JOB_TAG, env.CYCLE, "MASTER_ADDR", "MASTER_PORT"))


def is_respawned() -> bool:
    """Whether the launcher started this rank again alone, while the others went on."""
    return env.REJOIN in os.environ


def join(store: Store, state: State) -> Closed | None:
    """Joins a rank that was started again alone: waits until a round closes that lets it in. Blocks.

    The others' round goes on meanwhile, unless `--ft-rejoin now` asks to interrupt it. Sets the numbers in `state`.

    Returns:
        How that round closed; None: the function was done on all ranks before.
    """
    member, number = state.rank or 0, current(store)
    while Round(store, number).closing() is not None:  # let others in, and perhaps this member's former process
        number += 1
    joining(store).sign(Entry(member))
    if os.environ.get(env.REJOIN) == _NOW:
        record = InterruptionRecord(member, Interruption.JOINING, member)
        Round(store, number).interrupt(record.to_json())
    closed = closing_of(store, number)
    while closed is not None and member not in closed.joined_members:
        number += 1
        closed = closing_of(store, number)
    os.environ.pop(env.REJOIN, None)  # it takes part in the next call like the others
    if closed is None:
        return None
    state.initial_rank, state.initial_world_size = member, state.world_size
    state.rank, state.iteration = closed.world_size + closed.joined_members.index(member), number
    state.world_size = closed.world_size
    return closed


def meet(arguments: Arguments, make_store: Callable[[], Any], state: State) -> Coordination:
    """Connects to the store of the next call. Blocks. Every rank must make the same calls in the same order.

    Args:
        arguments: of the wrapper.
        make_store: a new connection with the user's arguments; the same object for each call.
        state: of this rank at entry.

    Raises:
        ValueError: the address of the store is not known.
        OSError: a file of the monitor process cannot be written, or the store's port is taken.
        RuntimeError: the store cannot be reached.
    """
    peer_names.look_up_no_more(torch)  # neither here nor in the rounds, whose groups are made over new connections
    if is_launched():
        logfile = _opened(arguments.monitor_process_logfile, state)
        return replace(_meet_at_agent(arguments, make_store), logfile=logfile)
    return _meet_alone(arguments, make_store, state)


def _meet_at_agent(arguments: Arguments, make_store: Callable[[], Any]) -> Coordination:
    if arguments.store_factory is not TCPStore:
        prefix = _next_prefix(_BASE)
        return _over(make_store(), make_store, arguments, prefix, _of_launcher())
    ignored = sorted({"host_name", "port"} & set(arguments.store_kwargs))
    if ignored:
        logger.info("store_kwargs %s are not used: the launcher hosts the store", ignored)
    host, port = _of_launcher()
    connect = partial(TCPStore, **{**arguments.store_kwargs, "host_name": host, "port": port})
    raw = connect()
    number = f"{_BASE}/call"
    present = None
    if is_respawned() and raw.check([number]):
        present = int(raw.get(number))
    prefix = _next_prefix(_BASE, present)
    if os.environ.get("RANK") == "0":
        raw.set(number, prefix.rpartition("/")[2])
    return _over(raw, connect, arguments, prefix, (host, port), is_served=True)


def _opened(path: str | None, state: State) -> str:
    """The path for this rank, after a check that it can be written; empty: no file is asked for.

    Raises:
        OSError: it cannot be written.
    """
    if path is None:
        return ""
    file = path_of(path, state.rank or 0)
    os.close(open_own(file, os.O_WRONLY | os.O_APPEND, 0o666))
    return str(file)


def _of_launcher() -> Address:
    """The address of the launcher's store: MASTER_ADDR and MASTER_PORT, unless rank 0 makes its own store there."""
    host, _, port = os.environ.get(env.CYCLE_STORE, "").rpartition(":")
    if not port:
        return address(host or None, None)
    return address(host or None, int(port))


def _meet_alone(arguments: Arguments, make_store: Callable[[], Any], state: State) -> Coordination:
    store_kwargs = arguments.store_kwargs
    where = None
    if isinstance(arguments.store_factory, type) and issubclass(arguments.store_factory, TCPStore):
        where = address(store_kwargs.get("host_name"), store_kwargs.get("port"))
    prefix = _next_prefix(f"{_BASE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    local_rank = 0
    with contextlib.suppress(ValueError):
        local_rank = int(os.environ.get("LOCAL_RANK", ""))
    hosts = state.rank == 0 and where is not None and not _is_hosted_by_agent(where)
    towards = where
    if towards is None:
        with contextlib.suppress(ValueError):
            towards = address(None, None)
    rounds_host = ""
    if state.rank == 0:
        rounds_host = own_address(towards)
    host, port = where or ("", 0)
    call = WatchedCall(
        member=state.rank or 0,
        world_size=state.world_size,
        prefix=prefix,
        host=host,
        port=port,
        hosts_store=hosts,
        heartbeat_interval_s=arguments.heartbeat_interval.total_seconds(),
        heartbeat_timeout_s=arguments.heartbeat_timeout.total_seconds(),
        barrier_timeout_s=arguments.barrier_timeout.total_seconds(),
        rounds_host=rounds_host,
    )
    companion = Companion.start(
        call,
        make_store,
        local_rank=local_rank,
        logfile=arguments.monitor_process_logfile,
        pidfile=arguments.monitor_process_pidfile,
    )
    process.start(environment=companion.environment)
    return _over(make_store(), make_store, arguments, prefix, towards, companion, is_served=companion.is_watching)


def _over(
    raw: Any,
    make_store: Callable[[], Any],
    arguments: Arguments,
    prefix: str,
    where: Address | None,
    companion: Companion | None = None,
    is_served: bool = False,
) -> Coordination:
    """A coordination over the connection `raw` and another one. `make_store`: one more of that kind."""
    if where is not None:
        gloo_connections.spare(where[1])
    second = _second(raw, make_store)
    raw.set_timeout(arguments.barrier_timeout)
    store, watched = PrefixStore(prefix, raw), PrefixStore(prefix, second)
    if companion is not None or not is_served:  # the launcher does not reach the store
        prefix = ""
    return Coordination(store, watched, prefix, where, companion, is_served, kept=(raw, second))


def _next_prefix(base: str, number: int | None = None) -> str:
    """The prefix of the keys of this process's next call."""
    global _calls
    if number is None:
        number = _calls
    _calls = number + 1
    return f"{base}/{number}"


def _is_hosted_by_agent(where: Address) -> bool:
    """Whether torchrun's agent serves a store there."""
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get(_USES_AGENTS) == "True" and (where[0], str(where[1])) == master


def _second(raw: Any, make_store: Callable[[], Any]) -> Any:
    """Another connection to the same store, by `clone()` where there is one: torch 2.6 and some stores have none."""
    with contextlib.suppress(NotImplementedError, RuntimeError, AttributeError):
        return raw.clone()
    return make_store()
