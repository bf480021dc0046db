"""RLIMIT_NOFILE: how many descriptors a launcher may open, and how many its job needs.

The launcher raises its soft limit to the hard one, since the usual soft limit of 1024 ended jobs of some 200 nodes.
Ranks get the user's limits. A limit that is too low for the job is an error at its start: later it would only show
as a store that refuses connections.
"""

from __future__ import annotations

import contextlib
import logging
import resource

from rank_monitor.contract.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECTIONS_PER_NODE = 2
"""Connections of each node to the rendezvous' store; see `nodes/connections.py`."""
_OWN, _OWN_PER_RANK = 64, 8
"""What a launcher has open without other nodes."""

_of_user: tuple[int, int] | None = None


def raise_soft() -> None:
    """Raises the soft limit of this process to the hard one. To be called before threads exist that start ranks."""
    global _of_user
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] != limits[1]:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            _of_user = limits


def give_back(pid: int) -> None:
    """Sets the limits of a process that this one has just started to those that the launcher was started with."""
    if _of_user is not None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or somebody has lowered the hard limit
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _of_user)


def needed(nodes: int, nprocs: int, hosts_job: bool, shares: bool) -> int:
    """Returns how many descriptors the launcher with the most connections has open at least. Pure.

    Any node may get rank 0 and host the store of a cycle. Each agent connects to it while ranks are assigned, and each
    rank for the whole cycle.

    Args:
        nodes: of the job.
        nprocs: ranks of this node; the others are taken to have as many.
        hosts_job: this node hosts the rendezvous' store.
        shares: the ranks use the store of the cycle.
    """
    of_each_node = 1
    if shares:
        of_each_node += nprocs
    if hosts_job:
        of_each_node += CONNECTIONS_PER_NODE
    return _OWN + _OWN_PER_RANK * nprocs + nodes * of_each_node


def must_do(least: int, most: int, nprocs: int, hosts_job: bool, shares: bool) -> None:
    """Checks the limit of this process for a job of `least` to `most` nodes; the other arguments as for `needed`.

    A limit that suffices for `least` but not for `most` nodes is a warning.

    Raises:
        ConfigError: the limit is too low for `least` nodes.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for nodes in (least, most):
        number = needed(nodes, nprocs, hosts_job, shares)
        if limit == resource.RLIM_INFINITY or number <= limit:
            continue
        if hosts_job:
            whose = "the rendezvous' store and that of a cycle"
        else:
            whose = "the store of a cycle"
        problem = f"a launcher that hosts {whose} needs {number} descriptors for {nodes} nodes with {nprocs} ranks each"
        hint = f"Start with a hard limit of {number} at least (ulimit -Hn, LimitNOFILE, --ulimit nofile)"
        if nodes == least:
            problem = f"{problem}, and RLIMIT_NOFILE is {limit}"
            if most == least:
                nodes_text = str(least)
            else:
                nodes_text = f"{least}:{most}"
            raise ConfigError("nnodes", nodes_text, "--nnodes", problem, hint)
        logger.warning("--nnodes: %s, and RLIMIT_NOFILE is %d. %s", problem, limit, hint)
