"""Asks NCCL's own watch (RAS: reliability, availability, serviceability) at a hang which ranks it reaches.

NCCL starts a RAS thread in each rank. The threads of all nodes are connected to each other, so any of them answers for
the whole job. The threads of one node listen at one address, which this file chooses (`variables`), and the kernel
gives a connection to any of them. Where no rank uses NCCL, the kernel refuses the connection. Where torch has no NCCL,
nothing is set, held or asked.

`agent/ranks.py` asks when a rank is about to exceed a limit. `agent/fault_finding.py` reads the answer before it stops
the ranks, after which NCCL could say nothing. `decide/attribution/ras_answer.py` reads what the answer means.

Threads: the agent's thread calls all methods. Each question has a thread `ft_nccl_ras`, which ends with the answer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait

from torch.distributed import is_nccl_available

from ft_launcher.decide.attribution import ras_answer
from ft_launcher.decide.attribution.nccl_view import NcclView
from ft_launcher.node.monitors.rank_report import RankReport
from rank_monitor.contract.processes.local_address import host_and_port, loopback

logger = logging.getLogger(__name__)

ADDRESS, ENABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"  # NCCL's own names
_DEFAULT_PORT = 28028
"""NCCL's, where its variable names none."""
_REQUEST = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
"""Sent at once: NCCL reads line by line, and answers with one line each; a release without JSON refuses that line, and
answers with text. TIMEOUT: so many seconds it waits for each of its peers, a second being the least."""
CONNECTIONS = 3
"""Connections to one question. The kernel may give a connection to a rank that is stopped: the connection opens, and
nothing answers."""
AGAIN_S = 5.0
"""All ranks exceed their limits at nearly the same moment: the first question is for all of them."""


@dataclass(frozen=True)
class RasWaits:
    """How long NCCL's RAS is waited for, in seconds.

    Attributes:
        first_bytes_s: after so long without an answer a further connection is made beside those before. NCCL answers
            the first line at once, from a thread of its own. All connections are made in less than `restart_s`.
        answer_s: from the question to the end of its answer: a later answer comes when the ranks are gone.
        restart_s: from the question on, a restart waits so long. NCCL takes milliseconds where it has long given up
            the ranks that it does not reach (after 5 to 60 s).
    """

    first_bytes_s: float = 0.12
    answer_s: float = 5.0
    restart_s: float = 0.5


@dataclass
class _Question:
    """One question and its answer, which another thread brings."""

    asked_at: float
    most_bytes: int
    pids: Collection[int]
    is_answered: threading.Event = field(default_factory=threading.Event)
    view: NcclView | None = None


class NcclRas:
    """NCCL's RAS of the ranks of this node, for the whole job.

    Args:
        environ: the launcher's own environment: what the user set there is used and left as it is.
        is_wanted: whether hangs are explained by what ranks wait for (`--ft-flight-recorder`).
        waits: how long an answer is waited for.
    """

    def __init__(self, environ: Mapping[str, str], is_wanted: bool, waits: RasWaits = RasWaits()) -> None:
        self._waits = waits
        self._held: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._question: _Question | None = None
        """The last one of this cycle."""
        self._last: _Question | None = None
        """The last one of any cycle."""
        if not is_wanted or not is_nccl_available() or environ.get(ENABLE, "").strip() == "0":
            return
        if ADDRESS in environ:
            self._address = address_in(environ[ADDRESS])
        else:
            self._held = _hold_port()
        if self._held is not None:
            self._address = self._held.getsockname()[:2]

    def variables(self) -> dict[str, str]:
        """Returns the variables that the ranks get: none if the user has set the address, or NCCL cannot be asked."""
        if self._held is None or self._address is None:
            return {}
        host, port = self._address
        return {ADDRESS: host_and_port(host, port)}

    def begin_cycle(self) -> None:
        """Resets what was asked: an answer about the last cycle must not be read in this one."""
        self._question = None

    def ask(self, now: float, ranks: int, pids: Collection[int], again_s: float = AGAIN_S) -> None:
        """Sends a question. Does not block.

        Does nothing if a question was sent in the last `again_s` seconds, or one still waits for its answer.

        Args:
            now: monotonic seconds.
            ranks: number of ranks of the job, which bounds the length of an answer.
            pids: of the ranks of this node. An answer that has none of them is about another job at this address.
            again_s: for how many seconds an earlier question will do.
        """
        if self._address is None:
            return
        if self._question is not None and now < self._question.asked_at + again_s:
            return
        # Reading what a stranger at this address sends may take long: never twice at a time.
        if self._last is not None and not self._last.is_answered.is_set():
            return
        question = self._question = self._last = _Question(now, ras_answer.most_bytes(ranks), pids)
        asking = threading.Thread(
            target=_answer, args=(question, self._address, self._waits), daemon=True, name="ft_nccl_ras"
        )
        try:
            asking.start()
        except RuntimeError as error:  # the machine, or the limit of this user, has no thread left
            question.is_answered.set()
            logger.warning("NCCL's RAS is not asked: %s", error)

    def view(self) -> NcclView | None:
        """Returns the answer to the last question of this cycle. Waits until `RasWaits.restart_s` after the question.

        None: there is none in time, or nothing was asked.
        """
        if self._question is None:
            return None
        self._question.is_answered.wait(max(0.0, self._question.asked_at + self._waits.restart_s - time.monotonic()))
        return self._question.view

    def close(self) -> None:
        """Releases the port."""
        if self._held is not None:
            self._held.close()


def address_in(text: str) -> tuple[str, int] | None:
    """Returns host and port of the user's NCCL_RAS_ADDR (`host:port`, `[address]:port`); None: NCCL refuses the
    text."""
    host, _, port = text.strip().rpartition(":")
    if not host:
        host, port = port, str(_DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _hold_port() -> socket.socket | None:
    """Returns a socket that keeps a port of loopback for this job; None: there is no port.

    Only processes of this user that share the port, as NCCL does (SO_REUSEPORT), can listen there. The socket itself
    does not listen, so that no connection comes to it.
    """
    held: socket.socket | None = None
    try:
        family, _, _, _, where = socket.getaddrinfo(loopback(), 0, flags=socket.AI_NUMERICHOST)[0]
        held = socket.socket(family)
        # Set after the bind: the kernel might give a port that is shared already.
        held.bind(where)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        if held is not None:
            held.close()
        logger.warning("no port for NCCL's RAS: %s; it has its default", error)
        return None
    return held


def hung_for_s(reports: Iterable[RankReport], now: float) -> float:
    """Returns for how long the ranks that hang have made no progress (seconds); `AGAIN_S` if no monitor ended its rank.

    An answer of NCCL from before that time was about a wait that has passed: it is asked again.
    """
    began = [
        one.verdict_at - one.verdict.waited_s
        for one in reports
        if one.verdict is not None and one.verdict.condemned and one.verdict_at is not None
    ]
    return now - max(began, default=now - AGAIN_S)


def _answer(question: _Question, address: tuple[str, int], waits: RasWaits) -> None:
    """The thread's function: asks over up to `CONNECTIONS` connections until there is an answer, and stores it."""
    deadline = time.monotonic() + waits.answer_s
    try:
        with contextlib.closing(_speaking(address, deadline, waits.first_bytes_s)) as connections:
            for connection in connections:
                try:
                    received = _received(connection, question.most_bytes, deadline)
                    view = ras_answer.view_in(received, question.pids)
                except (OSError, ValueError, RecursionError) as error:
                    logger.debug("NCCL's RAS at %s does not answer: %s", address, error)
                    continue
                question.view = replace(view, answered_at=time.monotonic())
                return
    except OSError as error:
        logger.debug("NCCL's RAS at %s cannot be asked: %s", address, error)
    finally:
        question.is_answered.set()


def _speaking(address: tuple[str, int], deadline: float, first_bytes_s: float) -> Generator[socket.socket]:
    """Asks, and yields each connection at which an answer begins, or which was closed.

    Where all connections are silent for `RasWaits.first_bytes_s`, a further one is made. Each of them may still answer.

    Raises:
        OSError: it is too late, or no descriptor is left.
    """
    with contextlib.ExitStack() as opened:
        silent: list[socket.socket] = []
        for made in range(1, CONNECTIONS + 1):
            with contextlib.suppress(ConnectionError):  # the rank that listened there has ended
                connection = opened.enter_context(socket.create_connection(address, _left(deadline)))
                connection.sendall(_REQUEST)
                silent.append(connection)
            limit_s = first_bytes_s
            while silent:
                if made == CONNECTIONS:
                    limit_s = _left(deadline)
                ready = wait(silent, min(limit_s, _left(deadline)))
                if not ready:
                    break
                for one in ready:
                    assert isinstance(one, socket.socket)
                    silent.remove(one)
                    with one:
                        yield one


def _received(connection: socket.socket, most: int, deadline: float) -> bytes:
    """Returns all bytes until the connection is closed.

    Raises:
        OSError: the deadline has passed, or more than `most` bytes have come.
    """
    received = bytearray()
    while len(received) <= most:
        connection.settimeout(_left(deadline))
        data = connection.recv(1 << 18)
        if not data:
            return bytes(received)
        received += data
    raise OSError("the answer is too long")


def _left(deadline: float) -> float:
    """Returns the seconds until `deadline`; raises TimeoutError where it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no time is left")
    return left_s
