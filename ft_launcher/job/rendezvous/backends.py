"""The rendezvous of a job, from torch's configuration and our settings: of one node, or of several over one store.

Called by `rendezvous_choice.py`, which chooses one of three functions; the handler goes to torch's agent. Only makes
handlers: the job's store is opened later, at the first formation, except for a handler that is not ours.

    one_node        c10d or static, with one node: no store, the coordinator is in this process
    several_nodes   c10d, static or etcd-v3 otherwise: our protocol over the store of that backend
    foreign         any other backend: torch makes its handler from its registry

Keys of `--rdzv-conf` keep torch's meaning and torch's defaults; options of our own come from the settings.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from ft_launcher.decide.policy.job_policy import JobPolicy
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import NO_RANK, JoinRequest
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.rendezvous.cycle_store import CycleStore, PortHolder, shares_store
from ft_launcher.job.rendezvous.foreign import ForeignRendezvous
from ft_launcher.job.rendezvous.guarded_handler import EndingSignals, created
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.job.store.store_connection import open_job_store
from rank_monitor.contract.settings.config import MemberSettings, Settings

logger = logging.getLogger(__name__)

_ONE_NODE = "ft-one-node"
_SEVERAL_NODES = "ft-nodes"
OURS = ("c10d", "static", "etcd-v3")
"""Backends over whose store our protocol runs. Any other, torch's `etcd` and `etcd-v2` too, is used as it is."""
_OVER_ETCD_V2 = ("etcd", "etcd-v2")
"""Backends of torch, whose client of etcd speaks the API v2 alone: an etcd of 3.6 or later answers 404 to it."""

# torch's defaults in its dynamic rendezvous, for the one of both keys that is not given.
_KEEP_ALIVE_S, _KEEP_ALIVE_ATTEMPTS = 5, 3
_JOIN_S = 600
"""torch's default of `join_timeout` in its dynamic rendezvous, and of `timeout` in the others."""
_PUT_BY_TORCH_S = 900
"""The `timeout` (seconds) that torch's `LaunchConfig` puts into a configuration that has none."""
_LEAST_BEATS = 6
"""Beats in the timeout, at least: one may be left out, and a node gives up two beats before others count it as lost."""
# Variables with a node's number, the first that is set counts. Slurm's task number comes first, before `--node-rank`,
# too: ranks follow Slurm's order of the nodes, in which neighbours are near each other in the network.
_INDICES = ("SLURM_PROCID", "SLURM_NODEID", "GROUP_RANK")
# Set by Slurm's topology plugins: the switches above a node and its name, with dots in between.
_TOPOLOGY = "SLURM_TOPOLOGY_ADDR"


def parameters_of(config: LaunchConfig) -> RendezvousParameters:
    """Returns what torch gives the handler of a job, as its own launcher does."""
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def one_node(config: LaunchConfig, settings: Settings, ports: PortHolder, host: str, shares: bool) -> NodeRendezvous:
    """Returns our rendezvous of a job of one node, without a store.

    No other node can join, so a cycle forms at once. torch's own handler sleeps up to 0.3 s at its first round and a
    second in later ones.

    Args:
        host: what the ranks see as MASTER_ADDR.
        shares: whether the ranks use the launcher's store.
    """
    me = _node_alone(config, host)
    of_node = _settings_of_one(settings, config.max_restarts)
    return NodeRendezvous(
        _ONE_NODE, config.run_id, open_store=None, me=me, settings=of_node, ports=ports, shares=shares
    )


def _node_alone(config: LaunchConfig, address: str) -> JoinRequest:
    """Returns the arrival of a node that is its own coordinator. `address`: at which it hosts the store of a cycle."""
    name = socket.gethostname()
    return JoinRequest(_node_id(name), 0, name, address, config.nproc_per_node, role=config.role)


def _settings_of_one(settings: Settings, max_restarts: int) -> NodeSettings:
    """Returns the rules of a node that is its own coordinator: a cycle has one node, and the policy is the job's."""
    members = settings.members
    policy = JobPolicy(settings.restart, max_restarts)
    return NodeSettings(Rules(Size(1, 1)), policy, members.node_beat, members.node_timeout)


def several_nodes(
    config: LaunchConfig,
    settings: Settings,
    ports: PortHolder,
    check_descriptors: Callable[[int, int, int, bool, bool], None],
) -> NodeRendezvous:
    """Returns our rendezvous of several nodes, over the store of the backend that the configuration names.

    The store is opened at the first formation, which the agent waits for so that a signal ends the wait.

    Args:
        check_descriptors: raises an error where this process may open too few for the job. Its arguments are the least
            and the most nodes, the ranks of a node, whether this node hosts the job's store, and whether the ranks use
            the store of a cycle.
    """
    parameters, static = parameters_of(config), config.rdzv_backend == "static"
    first_store = None
    if static:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
        first_store = CycleStore(0, host, port, server=None)

    def must_do(hosts: bool) -> None:
        shares = static or shares_store(os.environ)
        check_descriptors(parameters.min_nodes, parameters.max_nodes, config.nproc_per_node, hosts, shares)

    return NodeRendezvous(
        _SEVERAL_NODES,
        parameters.run_id,
        open_store=lambda: open_job_store(config.rdzv_backend, parameters, check=must_do),
        me=replace(
            this_node(config.nproc_per_node, parameters, settings.members, os.environ, insists=static),
            role=config.role,
        ),
        settings=node_settings(parameters, settings, config.max_restarts, static),
        ports=ports,
        first_store=first_store,
        shares=static or shares_store(os.environ),
    )


def foreign(config: LaunchConfig, settings: Settings, ports: PortHolder, signals: EndingSignals) -> ForeignRendezvous:
    """Has torch make a handler that is not ours, and returns it guarded (`guarded_handler.py`), for a node of ours.

    Raises:
        RendezvousConnectionError: torch's; nothing answers at its endpoint, or what answers has no such API.
        SignalException: torch's; a signal to the launcher arrived before the handler was there.
    """
    parameters = parameters_of(config)
    create = get_rendezvous_handler
    if parameters.backend in _OVER_ETCD_V2:
        create = _over_etcd_v2
    handler = created(lambda: create(parameters), signals)
    me, of_node = _node_alone(config, ""), _settings_of_one(settings, config.max_restarts)
    return ForeignRendezvous(handler, me, of_node, ports, float(config.monitor_interval))


def _over_etcd_v2(parameters: RendezvousParameters) -> RendezvousHandler:
    """Makes a handler of torch over etcd's v2 API, in a thread of `created`.

    Raises:
        RendezvousConnectionError: what answers at the endpoint, or does not, has no such API; the text says what to do.
    """
    from torch.distributed.elastic.rendezvous.etcd_rendezvous import etcd  # here: it takes 31 ms of a launch

    try:
        return get_rendezvous_handler(parameters)
    except (etcd.EtcdException, RendezvousConnectionError) as error:
        # torch's own error only refers to its cause.
        cause = error.__cause__ or error
        raise RendezvousConnectionError(_about_etcd_v2(parameters.endpoint, cause)) from error


def _about_etcd_v2(endpoint: str, error: BaseException) -> str:
    """Says in one line why torch's handler over etcd's v2 API could not be made, and what to use in its place."""
    if "404" in str(error):  # what answers knows nothing of /v2
        problem = f"what answers at {endpoint} has no v2 API of etcd"
        return f"{problem} (etcd 3.6 and later have none): use --rdzv-backend=etcd-v3"
    return f"no etcd at {endpoint}: {str(error).strip() or type(error).__name__}"


def this_node(
    nprocs: int, parameters: RendezvousParameters, members: MemberSettings, environ: Mapping[str, str], insists: bool
) -> JoinRequest:
    """Returns this node's arrival, without number, cycle and fault.

    Args:
        nprocs: how many ranks it has.
        parameters: torch's, with the node rank of the command line and the address of this host.
        members: our settings about nodes.
        environ: the environment, which Slurm and cluster managers set.
        insists: the node rank of the command line must be kept, as with the static backend; otherwise it only sorts.
    """
    name = socket.gethostname()
    rank = int(parameters.config.get("rank", 0))
    index = _index(environ, rank, insists)
    topology = environ.get(_TOPOLOGY, "")
    return JoinRequest(
        node=_node_id(name),
        seq=0,
        name=name,
        address=parameters.local_addr or socket.getfqdn(),
        nprocs=nprocs,
        # Compared as text, so the number has leading zeros.
        order=f"{index:010d} {topology} {name}",
        rank=rank if insists else NO_RANK,
        # `SWITCH.SWITCH.NODE`: without its last part the block of nodes below one switch.
        group=members.node_group or topology.rpartition(".")[0],
    )


def _node_id(name: str) -> str:
    """Returns the id of a node. Random at the end: containers may share a host name, and their pids."""
    return f"{name}-{os.getpid()}-{secrets.token_hex(4)}"


def _index(environ: Mapping[str, str], rank: int, insists: bool) -> int:
    """Returns the number by which nodes are sorted at first: one in the environment, else the node rank of the user."""
    name = next((key for key in _INDICES if environ.get(key, "").isdigit()), None)
    if name is None:
        return rank
    index = int(environ[name])
    if rank not in (0, index) and not insists:
        logger.warning("--node-rank %d has no effect: nodes are sorted by %s, which is %d here", rank, name, index)
    return index


def node_settings(
    parameters: RendezvousParameters, settings: Settings, max_restarts: int, static: bool = False
) -> NodeSettings:
    """Returns the rules and times of a job of several nodes, from torch's keys and our settings.

    Args:
        parameters: torch's, with the numbers of nodes and the keys of `--rdzv-conf`.
        settings: ours.
        max_restarts: the budget of restarts (`--max-restarts`).
        static: whether the backend is torch's static one, whose `timeout` has another meaning.
    """
    members = settings.members
    size = Size(
        minimum=parameters.min_nodes,
        maximum=parameters.max_nodes,
        held_back=members.spares,
        segment=members.segment,
        may_grow=members.scale in ("up", "both"),
        may_shrink=members.scale in ("down", "both"),
    )
    timeout_s = _node_timeout_s(parameters, members)
    rules = Rules(
        size,
        # torch's default.
        last_call_s=float(parameters.get_as_int("last_call_timeout", 30) or 0),
        join_s=_join_s(parameters, static),
        keep_healthy=settings.restart.restart_policy == "min-healthy",
        # A dead node that holds the rank is detected in this time, and another may then have it.
        rank_claim_s=timeout_s + members.node_beat,
    )
    beat_s = min(members.node_beat, timeout_s / _LEAST_BEATS)
    of_node = NodeSettings(rules, JobPolicy(settings.restart, max_restarts), beat_s, timeout_s)
    close_s = parameters.get_as_int("close_timeout")
    if close_s is None:
        return of_node
    return replace(of_node, close_s=float(close_s))


def _join_s(parameters: RendezvousParameters, static: bool) -> float:
    """Returns how many seconds the minimum of nodes is waited for: `join_timeout`, else `timeout`, else 600 s.

    torch itself puts `timeout` into each configuration that has none. Its static rendezvous waits for so long. With any
    other backend a `timeout` of that very value is not taken as a wish of the user.
    """
    timeout_s = parameters.get_as_int("timeout", _JOIN_S)
    if timeout_s == _PUT_BY_TORCH_S and not static:
        timeout_s = _JOIN_S
    return float(parameters.get_as_int("join_timeout", timeout_s) or _JOIN_S)


def _node_timeout_s(parameters: RendezvousParameters, members: MemberSettings) -> float:
    """Returns `--ft-node-timeout` (seconds), or what torch's keys for the same purpose say: interval times attempts."""
    keys = ("keep_alive_interval", "keep_alive_max_attempt")
    if not any(key in parameters.config for key in keys):
        return members.node_timeout
    interval = parameters.get_as_int(keys[0], _KEEP_ALIVE_S) or _KEEP_ALIVE_S
    return float(interval * (parameters.get_as_int(keys[1], _KEEP_ALIVE_ATTEMPTS) or _KEEP_ALIVE_ATTEMPTS))
