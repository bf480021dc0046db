"""RLIMIT_NOFILE: how many descriptors a launcher may open, how many its job needs, and a reserve for its restarts.

The launcher raises its soft limit to the hard one, since the usual soft limit of 1024 ended jobs of some 200 nodes.
Ranks get the user's limits. A limit that is too low for the job is an error at its start: later it would only show
as a store that refuses connections. It can also be lowered while the launcher runs (`prlimit`): a restart opens a few
dozen descriptors at once, failed half-way then, and ended the job with code 81. So the node agent waits between cycles
until it can open them. Fails open: after a bounded wait the restart is tried all the same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator

from rank_monitor.contract.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECTIONS_PER_NODE = 2
"""Connections of each node to the rendezvous' store; see `job/link/connections.py`."""
_OWN, _OWN_PER_RANK = 64, 8
"""What a launcher has open without other nodes."""

_OF_RESTART = 24
"""Pipes, sockets and files of /proc that a restart opens in addition to those of the ranks, with room to spare."""
_OF_RESTART_PER_RANK = 3
"""A pidfd in each of two tables, and a log file."""
# No event reports a raised limit, so it is polled.
_RETRY_S = 0.5
_MAX_S = 600.0
"""After this time the restart is tried all the same: its error then names what it cannot open."""

_TO_START = 64
"""Descriptors that must be free below the user's limit for the moment in which it is this process' own: a start needs a
dozen, and other threads may open some meanwhile."""

_of_user: tuple[int, int] | None = None
_starting = threading.Lock()


def raise_soft() -> None:
    """Raises the soft limit of this process to the hard one. To be called before threads exist that start ranks."""
    global _of_user
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and _raise_to(hard):
        _of_user = soft, hard


@contextlib.contextmanager
def of_user() -> Iterator[Callable[[int], object]]:
    """Context in which a process that this one starts gets the limits that the launcher was started with. Any thread.

    Meanwhile this process has the user's soft limit: the child inherits it, so that its program begins with it. Where
    more descriptors are open than that allows, the child gets it after its start, which its program may notice.

    Yields:
        A function that is to be called with the pid of the child once its program has begun.
    """
    if _of_user is None:
        yield lambda pid: None
        return
    with _starting:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_lowered = hard == _of_user[1] and soft > _of_user[0] and _set(_of_user[0], hard)
        try:
            if is_lowered and _can_open(_TO_START):
                yield lambda pid: None
                return
            if is_lowered:
                _set(soft, hard)
            yield _give_back
        finally:
            if is_lowered:
                _set(soft, hard)


def _give_back(pid: int) -> None:
    assert _of_user is not None
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


class Reserve:
    """Descriptors that are held open while ranks train, and closed when a restart could open no others.

    Args:
        nprocs: ranks of this node.
    """

    def __init__(self, nprocs: int) -> None:
        self._needed = _OF_RESTART + _OF_RESTART_PER_RANK * nprocs
        self._held: list[int] = []
        self._hard_at_start = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def fill(self) -> None:
        """Opens as many as a restart needs, if the limit leaves twice as many for others. Does nothing if held."""
        if not self._held and _can_open(3 * self._needed):
            self._held = _open(self._needed)

    def release(self) -> None:
        """Closes them."""
        while self._held:
            os.close(self._held.pop())

    def await_enough(self, wait: Callable[[float], object | None]) -> bool:
        """Waits until a restart can open what it needs; logs one line for each measure that it takes.

        Raises the soft limit of this process to the hard one, then releases what is held, then waits for ten minutes at
        most.

        Args:
            wait: waits for the given seconds; returns anything but None when a signal arrived, which ends the wait.

        Returns:
            Whether there are enough.
        """
        deadline, is_logged = time.monotonic() + _MAX_S, False
        while not _can_open(self._needed):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != hard and _raise_to(hard):
                logger.warning("RLIMIT_NOFILE of the launcher was lowered to %d; it is %d again", soft, hard)
            elif self._held:
                logger.warning("RLIMIT_NOFILE of the launcher was lowered to %d; it uses its reserve", hard)
                self.release()
            elif hard >= self._hard_at_start:
                return False  # a limit that was always tight, and that the first cycle did with
            else:
                if not is_logged:
                    logger.warning(
                        "RLIMIT_NOFILE of the launcher is %d, and a restart needs %d descriptors more: it waits "
                        "(prlimit --pid %d --nofile=4096)", hard, self._needed, os.getpid()
                    )  # fmt: skip
                is_logged = True
                if wait(_RETRY_S) is not None or time.monotonic() > deadline:
                    return False
        return True


def _raise_to(hard: int) -> bool:
    return _set(hard, hard)


def _set(soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


def _can_open(number: int) -> bool:
    opened = _open(number)
    for descriptor in opened:
        os.close(descriptor)
    return len(opened) == number


def _open(number: int) -> list[int]:
    """Opens `number` descriptors, or as many as the limit allows."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            # O_PATH opens no file, so no permission is needed and no file system does any work.
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return opened
