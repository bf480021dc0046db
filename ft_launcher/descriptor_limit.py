"""How many descriptors a launcher may open, and how many its job takes: RLIMIT_NOFILE.

The launcher raises its soft limit to the hard one; ranks get what the user gave the launcher. A limit that the job
cannot do with is an error at its start, since later it would only show as a store that refuses connections.
"""

from __future__ import annotations

import contextlib
import logging
import resource

from rank_monitor.contract.errors import ConfigError

logger = logging.getLogger(__name__)

LINES = 2
"""To the rendezvous' store, for each node; see `nodes/lines.py`."""
_OWN, _OWN_PER_RANK = 64, 8
"""What a launcher has open without other nodes."""

_of_user: tuple[int, int] | None = None


def raise_soft() -> None:
    """Raises the soft limit of this process to the hard one, from before there are threads that start ranks."""
    global _of_user
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] != limits[1]:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            _of_user = limits


def give_back(pid: int) -> None:
    """Gives a process that this one has just started the limit that the user gave the launcher."""
    if _of_user is not None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or somebody has lowered the hard limit
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _of_user)


def needed(nodes: int, nprocs: int, hosts_job: bool, shares: bool) -> int:
    """How many descriptors the launcher with the most to bear has open at least. Pure.

    Any node may get rank 0 and host the store of a cycle, to which each agent connects while ranks are assigned, and
    each rank for the cycle.

    Args:
        nodes: of the job.
        nprocs: ranks of this node; the others are taken to have as many.
        hosts_job: this node hosts the rendezvous' store.
        shares: the ranks use the store of the cycle.
    """
    of_cycle = 1 + (nprocs if shares else 0)
    return _OWN + _OWN_PER_RANK * nprocs + nodes * (of_cycle + (LINES if hosts_job else 0))


def must_do(least: int, most: int, nprocs: int, hosts_job: bool, shares: bool) -> None:
    """Checks the limit of this process for a job of `least` to `most` nodes; the rest as for `needed`.

    Raises:
        ConfigError: it will not do for the least.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for nodes in (least, most):
        number = needed(nodes, nprocs, hosts_job, shares)
        if limit == resource.RLIM_INFINITY or number <= limit:
            continue
        whose = "the rendezvous' store and that of a cycle" if hosts_job else "the store of a cycle"
        problem = f"a launcher that hosts {whose} needs {number} descriptors for {nodes} nodes with {nprocs} ranks each"
        hint = f"Start with a hard limit of {number} at least (ulimit -Hn, LimitNOFILE, --ulimit nofile)"
        if nodes == least:
            problem = f"{problem}, and RLIMIT_NOFILE is {limit}"
            raise ConfigError("nnodes", f"{least}:{most}" if most != least else least, "--nnodes", problem, hint)
        logger.warning("--nnodes: %s, and RLIMIT_NOFILE is %d. %s", problem, limit, hint)
