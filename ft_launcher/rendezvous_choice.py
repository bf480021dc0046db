"""Which rendezvous a job has: the choice of `composition.py`, by options, number of nodes and endpoint.

Looks up names of hosts, in the main thread. Makes no connection: `Rendezvous.make` does, when the agent is made.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ft_launcher.job.rendezvous import backends
from ft_launcher.job.rendezvous.cycle_store import PortHolder, shares_store
from ft_launcher.node.processes import descriptor_limit
from ft_launcher.node.processes.signals import SignalPipe
from ft_launcher.settings.job_settings import STATIC_PORT, Job
from ft_launcher.settings.rendezvous_check import is_file_store
from rank_monitor.contract.processes import local_address

logger = logging.getLogger("ft_launcher")

_OWN_STORE = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not needed here, where each cycle has a fresh store. It has rank 0 make "
    "the ranks' store, and a rank that looks for it too early waits 0.3 to 0.8 s longer: about one restart in three"
)


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a job.

    Attributes:
        ports: holds the port of the ranks' store.
        has_several_nodes: whether other nodes may take part.
        is_ours: whether the nodes speak our protocol, or there is one.
        make: makes torch's handler. May connect to a store, and so block or fail.
    """

    ports: PortHolder
    has_several_nodes: bool
    is_ours: bool
    make: Callable[[], RendezvousHandler]


def choose_rendezvous(job: Job, signals: SignalPipe) -> Rendezvous:
    """Chooses the rendezvous of a job: one of ours where there is one.

    The only node of a job needs no store to find others. Several nodes run our protocol over torch's store or etcd. For
    any other backend torch makes its own handler (`job/rendezvous/foreign.py`).

    Raises:
        RendezvousConnectionError: there are several nodes, and the host of the endpoint does not resolve.
    """
    config, port_range = job.launch_config, job.settings.start.port_range
    # Under torchrun the ranks' store is at the given endpoint with the static rendezvous only, so only there address
    # and port are promised.
    static = config.rdzv_backend == "static"
    if not static and not shares_store(os.environ):
        logger.warning("%s", _OWN_STORE)
    alone = config.max_nodes == 1 and not job.settings.members.spares
    master, port = local_address.loopback(), None
    if config.rdzv_endpoint and config.rdzv_backend in ("c10d", "static") and not is_file_store(config.rdzv_configs):
        host, named_port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=STATIC_PORT)
        if not alone:
            _must_resolve(host, config.rdzv_endpoint)
        if static:
            master, port = host, named_port
    if alone and config.rdzv_backend in ("c10d", "static"):
        if not static:
            master = config.local_addr or master
        master = _host_of_one_node(master)
        ports = PortHolder(master, port, port_range)
        shares = static or shares_store(os.environ)
        return Rendezvous(ports, False, True, partial(backends.one_node, config, job.settings, ports, master, shares))
    # Several nodes, or a handler that is not ours: the store of each cycle gets a free port on the node of rank 0.
    ports = PortHolder(config.local_addr or socket.gethostname(), None, port_range)
    if config.rdzv_backend in backends.OURS:
        several = partial(backends.several_nodes, config, job.settings, ports, descriptor_limit.must_do)
        return Rendezvous(ports, True, True, several)
    return Rendezvous(ports, True, False, partial(backends.foreign, config, job.settings, ports, signals))


def _host_of_one_node(name: str) -> str:
    """Returns MASTER_ADDR for the ranks of a job of one node: the given name where it resolves, else a loopback
    address."""
    problem = _look_up_problem(name)
    if not problem:
        return name
    address = local_address.loopback()
    logger.warning("%r does not resolve (%s): the ranks of this node meet at %s", name, problem, address)
    return address


def _must_resolve(host: str, endpoint: str) -> None:
    """Checks that the host of the endpoint resolves.

    Raises:
        RendezvousConnectionError: it does not.
    """
    problem = _look_up_problem(host)
    if problem:
        raise RendezvousConnectionError(f"the host of {endpoint!r} does not resolve ({problem})")


def _look_up_problem(host: str) -> str:
    """Looks up a host. Returns why no address is found; empty: one is found. Blocks for as long as the resolver
    takes."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return str(error)
    return ""
