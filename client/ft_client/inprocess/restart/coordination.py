"""Connects a rank to the store of a call, and provides for reports about a dead rank.

`wrapper.py` calls `meet` at the start of each call of a wrapped function, and `join` where this rank was started again
alone. No rank hosts the store: a rank's death must not take the store from the other ranks.

| | under the launcher | without it |
|---|---|---|
| the store | the cycle's, hosted by a node agent | hosted by the standalone agent of rank 0, torchrun, or the user |
| who reports a dead rank | its node agent | its standalone agent (`standalone/agent_handle.py`) |
| who serves the rounds' stores | the agent that hosts the store | the standalone agent of rank 0 |

A rank serves its round's store only where no other process can (`Coordination.must_serve`).

All calls of a process share one store. Each call has its keys under a prefix with the call's number, so every rank must
make the same calls in the same order.
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
from ft_client.inprocess.standalone.agent_handle import AgentHandle
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
"""All prefixes of calls begin with it: other users of the store keep their own keys."""
_USES_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
_NOW = "now"
"""The value of `--ft-rejoin` with which a rank that was started again interrupts the other ranks' round."""
_calls = 0
"""The number of the next call in this process."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Coordination:
    """The stores and the standalone agent of one call.

    Attributes:
        store: the call's keys, for the main thread.
        watched: the call's keys through a second connection, for the watcher's thread: a wait blocks its connection for
            other threads.
        prefix: the prefix of these keys, where the launcher can reach them; else empty.
        towards: an address by which the ranks' hosts reach each other; None: there is only one host.
        agent: this rank's standalone agent; None under the launcher.
        is_served: whether a process that is not a rank serves the stores of the rounds.
        logfile: where this rank's monitor is to write its log; empty: nowhere, or the monitor does so already.
        kept: objects that must live as long as the stores.
    """

    store: Any
    watched: Any
    call_prefix: str
    towards: Address | None
    agent: AgentHandle | None
    is_served: bool
    logfile: str = ""
    kept: tuple[Any, ...] = field(default=(), repr=False)

    def must_serve(self, state: State) -> bool:
        """Returns whether this rank has to serve the store of its round.

        Where no other process serves it, the first active rank does. Where the standalone agent of the call's first
        rank did but is lost, that rank does.
        """
        if not self.is_served:
            return state.active_rank == 0
        return state.initial_rank == 0 and self.agent is not None and self.agent.is_lost

    def close(self) -> None:
        """Ends the call for this rank: its standalone agent, where there is one, watches it no longer."""
        if self.agent is not None:
            self.agent.close()


def is_launched() -> bool:
    """Returns whether this rank was started by the launcher, whose agent hosts a store for it."""
    return all(name in os.environ for name in (env.JOB_TAG, env.CYCLE, "MASTER_ADDR", "MASTER_PORT"))


def is_respawned() -> bool:
    """Returns whether the launcher started this rank again alone, while the other ranks went on."""
    return env.REJOIN in os.environ


def join(store: Store, state: State) -> Closed | None:
    """Joins a rank that was started again alone. Blocks until a round closes that lets the rank in.

    The other ranks' round goes on meanwhile, unless `--ft-rejoin now` asks to interrupt it. The rank keeps its number
    at entry; in the round it gets a number after the last rank, which the rank assignment then changes.

    Args:
        store: the keys of the call, through the connection on which this thread may block.
        state: the state of this rank; its numbers are set here.

    Returns:
        How that round closed; None: the function was done on all ranks before.
    """
    member, number = state.rank or 0, current(store)
    # Rounds that have closed already may have let in this rank's previous process. They do not count.
    while Round(store, number).closing() is not None:
        number += 1
    joining(store).sign(Entry(member))
    if os.environ.get(env.REJOIN) == _NOW:
        record = InterruptionRecord(member, Interruption.JOINING, member)
        Round(store, number).interrupt(record.to_json())
    closed = closing_of(store, number)
    while closed is not None and member not in closed.joined_members:
        number += 1
        closed = closing_of(store, number)
    os.environ.pop(env.REJOIN, None)  # this rank takes part in the next call like all others
    if closed is None:
        return None
    state.initial_rank, state.initial_world_size = member, state.world_size
    state.rank, state.iteration = closed.world_size + closed.joined_members.index(member), number
    state.world_size = closed.world_size
    return closed


def meet(arguments: Arguments, make_store: Callable[[], Any], state: State) -> Coordination:
    """Connects to the store of the next call. Blocks until the store answers, or its timeout has passed.

    Called once for each call of a wrapped function. Every rank must make the same calls in the same order.

    Args:
        arguments: the wrapper's arguments.
        make_store: makes a new connection with the user's arguments; the same object for each call.
        state: the state of this rank at entry.

    Raises:
        ValueError: the address of the store is not known.
        OSError: a file of the monitor process cannot be written, or the store's port is taken.
        RuntimeError: the store cannot be reached.
    """
    # torch's stores would look up a name of each peer, here and in each round, whose groups are made over new
    # connections. A slow resolver would hold up every restart.
    peer_names.look_up_no_more(torch)
    if is_launched():
        logfile = _opened(arguments.monitor_process_logfile, state)
        return replace(_meet_at_agent(arguments, make_store), logfile=logfile)
    return _meet_alone(arguments, make_store, state)


def _meet_at_agent(arguments: Arguments, make_store: Callable[[], Any]) -> Coordination:
    """Connects to the store that a node agent hosts; to the user's own store, where `store_factory` names one.

    Only in the agent's store a rank that was started again alone learns the number of the other ranks' present call,
    which rank 0 writes there.
    """
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
    """Returns the path for this rank, after a check that the file can be written; empty: no file is asked for.

    The monitor writes the file. This rank checks it, so that the user gets the error where the wrapper is called.

    Raises:
        OSError: it cannot be written.
    """
    if path is None:
        return ""
    file = path_of(path, state.rank or 0)
    os.close(open_own(file, os.O_WRONLY | os.O_APPEND, 0o666))
    return str(file)


def _of_launcher() -> Address:
    """Returns the address of the launcher's store.

    That is MASTER_ADDR and MASTER_PORT, unless rank 0 makes its own store there: then the launcher names its own in
    the variable `env.CYCLE_STORE`.
    """
    host, _, port = os.environ.get(env.CYCLE_STORE, "").rpartition(":")
    if not port:
        return address(host or None, None)
    return address(host or None, int(port))


def _meet_alone(arguments: Arguments, make_store: Callable[[], Any], state: State) -> Coordination:
    """Starts this rank's standalone agent, which may host the store, then connects to the store.

    In this order: the store of the ranks may be in the standalone agent of rank 0.
    """
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
    agent = AgentHandle.start(
        call,
        make_store,
        local_rank=local_rank,
        logfile=arguments.monitor_process_logfile,
        pidfile=arguments.monitor_process_pidfile,
    )
    process.start(environment=agent.environment)
    return _over(make_store(), make_store, arguments, prefix, towards, agent, is_served=agent.is_watching)


def _over(
    raw: Any,
    make_store: Callable[[], Any],
    arguments: Arguments,
    prefix: str,
    where: Address | None,
    agent: AgentHandle | None = None,
    is_served: bool = False,
) -> Coordination:
    """Returns a coordination over the connection `raw` and a second one to the same store.

    Args:
        raw: a connection to the store.
        make_store: makes another connection of that kind, where `raw` cannot be cloned.
        arguments: the wrapper's arguments.
        prefix: the prefix of the call's keys.
        where: the address of the store; None: the store is no TCP store.
        agent: this rank's standalone agent; None under the launcher.
        is_served: whether another process than a rank serves the stores of the rounds.
    """
    if where is not None:
        gloo_connections.spare(where[1])
    second = _second(raw, make_store)
    raw.set_timeout(arguments.barrier_timeout)
    store, watched = PrefixStore(prefix, raw), PrefixStore(prefix, second)
    if agent is not None or not is_served:  # the launcher does not reach the store
        prefix = ""
    return Coordination(store, watched, prefix, where, agent, is_served, kept=(raw, second))


def _next_prefix(base: str, number: int | None = None) -> str:
    """Returns the prefix of the keys of this process's next call.

    Args:
        base: what the prefix begins with.
        number: the call's number, for a rank that was started again alone and joins the other ranks' present call;
            None: the next of this process.
    """
    global _calls
    if number is None:
        number = _calls
    _calls = number + 1
    return f"{base}/{number}"


def _is_hosted_by_agent(where: Address) -> bool:
    """Returns whether torchrun's agent serves a store at this address."""
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get(_USES_AGENTS) == "True" and (where[0], str(where[1])) == master


def _second(raw: Any, make_store: Callable[[], Any]) -> Any:
    """Returns another connection to the same store, by `clone()` where there is one: torch 2.6 and some stores have
    none."""
    with contextlib.suppress(NotImplementedError, RuntimeError, AttributeError):
        return raw.clone()
    return make_store()
