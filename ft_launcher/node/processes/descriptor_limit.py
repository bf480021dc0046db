"""RLIMIT_NOFILE: how many descriptors a launcher may open, how many its job needs, and a reserve for its restarts.

The launcher raises its soft limit to the hard one (`raise_soft`, called by `composition.py`): the usual soft limit of
1024 ended jobs of some 200 nodes. Ranks and health checks must start with the user's limits, so each place that starts
a process does so within `of_user`.

A limit that is too low for the job is an error at the job's start (`must_do`, called when the rendezvous is opened).
Without that check the limit would show hours later, as a store that refuses connections.

The limit can also be lowered while the launcher runs (`prlimit`). A restart opens a few dozen descriptors at once; one
that failed half-way ended its job with exit code 81. So the node agent holds a `Reserve` while ranks run, and waits
between cycles until a restart can open what it needs. Fails open: after a bounded wait the restart is tried anyway.
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
"""Descriptors that a launcher has open without any connection of another node: a constant part, and a part for each
rank of this node (for instance its monitor's channel and pidfd, the rank's pidfd, and its log files)."""

_OF_RESTART = 24
"""Pipes, sockets and files of /proc that a restart opens in addition to those of the ranks, with room to spare."""
_OF_RESTART_PER_RANK = 3
"""A pidfd in each of two tables, and a log file."""
# No event reports a raised limit, so it is polled.
_RETRY_S = 0.5
_MAX_S = 600.0
"""After this time the restart is tried all the same: its error then names what it cannot open."""

_TO_START = 64
"""Descriptors that must be free below the user's soft limit while that limit is this process' own (see `of_user`). The
start of a process needs a dozen, and other threads may open some meanwhile."""

_of_user: tuple[int, int] | None = None
"""The soft and the hard limit that the launcher was started with; None: `raise_soft` has changed nothing."""
_starting = threading.Lock()
"""Held by the thread that has lowered the limit of this process in order to start a child."""


def raise_soft() -> None:
    """Raises the soft limit of this process to the hard one.

    Called once, before threads exist that start ranks: such a thread reads without a lock which limits the user has.
    """
    global _of_user
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and _raise_to(hard):
        _of_user = soft, hard


@contextlib.contextmanager
def of_user() -> Iterator[Callable[[int], object]]:
    """Context in which a child process starts with the limits that the user gave the launcher. Any thread may enter it.

    While the context is open, this process itself has the user's soft limit. The child inherits that limit, so its
    program has it from the first instruction on. Where this process has too many descriptors open for the user's limit,
    the child starts with the raised limit and is corrected afterwards, which its program may notice.

    Yields:
        A function to call with the pid of the child once its program has begun. It makes the correction, or does
        nothing where none is needed.

    Example:
        with descriptor_limit.of_user() as give_back:
            process = subprocess.Popen(...)
            give_back(process.pid)
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
    """Resets RLIMIT_NOFILE of child `pid` to the user's values: the launcher has raised its own, which `pid` inherited.

    A rank must not keep the raised limit. A program that closes every possible descriptor takes seconds with a limit of
    a million, and select(2) does not work with a descriptor above 1023.
    """
    assert _of_user is not None
    with contextlib.suppress(OSError, ValueError):  # the child has ended, or somebody has lowered the hard limit
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _of_user)


def needed(nodes: int, nprocs: int, hosts_job: bool, shares: bool) -> int:
    """Returns how many descriptors the launcher with the most connections has open at least. Pure.

    That launcher is the one that hosts the store of a cycle. Any node may become this host, since any node may get rank
    0. Each agent is connected to the store while ranks are assigned, and each rank for the whole cycle.

    Args:
        nodes: number of nodes of the job.
        nprocs: number of ranks of this node. The other nodes are assumed to have as many.
        hosts_job: whether this node hosts the rendezvous' store.
        shares: whether the ranks use the store of the cycle.
    """
    of_each_node = 1
    if shares:
        of_each_node += nprocs
    if hosts_job:
        of_each_node += CONNECTIONS_PER_NODE
    return _OWN + _OWN_PER_RANK * nprocs + nodes * of_each_node


def must_do(least: int, most: int, nprocs: int, hosts_job: bool, shares: bool) -> None:
    """Checks the limit of this process for a job of `least` to `most` nodes (`--nnodes`).

    Logs a warning for a limit that suffices for `least` nodes but not for `most`. The other arguments are those of
    `needed`.

    Raises:
        ConfigError: the limit is too low for `least` nodes, so the job could never start.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for nodes in (least, most):
        number = needed(nodes, nprocs, hosts_job, shares)
        if limit == resource.RLIM_INFINITY or number <= limit:
            continue
        if hosts_job:
            stores = "the rendezvous' store and that of a cycle"
        else:
            stores = "the store of a cycle"
        problem = (
            f"a launcher that hosts {stores} needs {number} descriptors for {nodes} nodes with {nprocs} ranks each"
        )
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

    Made by the node agent, once for a job. All methods are called on the agent's thread: `fill` when a cycle has
    formed, `await_enough` when it has ended, `release` at the end of the job.

    Args:
        nprocs: number of ranks of this node.
    """

    def __init__(self, nprocs: int) -> None:
        self._needed = _OF_RESTART + _OF_RESTART_PER_RANK * nprocs
        self._held: list[int] = []
        self._hard_at_start = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def fill(self) -> None:
        """Opens as many descriptors as a restart needs.

        Does nothing where the reserve is held already, or where the limit leaves less than twice as many descriptors
        for all else: a reserve must not be the reason why something else cannot be opened.
        """
        if not self._held and _can_open(3 * self._needed):
            self._held = _open(self._needed)

    def free(self) -> None:
        """Closes the descriptors of the reserve, if any are held."""
        while self._held:
            os.close(self._held.pop())

    def await_enough(self, wait: Callable[[float], object | None]) -> bool:
        """Waits until a restart can open what it needs. Blocks for `_MAX_S` at most.

        Takes these measures in order, each with one line in the log, until enough can be opened:
        1. raises the soft limit of this process to the hard one,
        2. releases the reserve,
        3. waits for somebody to raise the hard limit.

        Args:
            wait: called with a number of seconds to wait. A result other than None says that a signal arrived, which
                ends the wait.

        Returns:
            Whether a restart can open what it needs. The caller restarts in both cases.
        """
        deadline, is_logged = time.monotonic() + _MAX_S, False
        while not _can_open(self._needed):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != hard and _raise_to(hard):
                logger.warning("RLIMIT_NOFILE of the launcher was lowered to %d; it is %d again", soft, hard)
            elif self._held:
                logger.warning("RLIMIT_NOFILE of the launcher was lowered to %d; it uses its reserve", hard)
                self.free()
            elif hard >= self._hard_at_start:
                return False  # The limit was as tight at the start, and the first cycle did with it.
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
    """Sets both limits of this process to `hard`; returns whether the kernel allowed it."""
    return _set(hard, hard)


def _set(soft: int, hard: int) -> bool:
    """Sets the limits of this process; returns whether the kernel allowed it."""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return False
    return True


def _can_open(number: int) -> bool:
    """Returns whether `number` descriptors can be opened now, by opening and closing them (a few microseconds each).

    The limit alone does not say this: the number of open descriptors can be read only by listing /proc/self/fd.
    """
    opened = _open(number)
    for descriptor in opened:
        os.close(descriptor)
    return len(opened) == number


def _open(number: int) -> list[int]:
    """Opens `number` descriptors, or as many as the limits of the process (EMFILE) and the system (ENFILE) allow."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            # O_PATH opens no file, so no permission is needed and no file system does any work.
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return opened
