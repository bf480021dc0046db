"""The program that keeps copies of the states in memory of other nodes, and has those of its own node kept by others.

The launcher of each node starts one (`ft_launcher/node/memory_files/copies.py`) where the job has
`--ft-memory-buddies`. It is a process of its own since checksums and bytes would take the interpreter of the launcher,
which must end ranks in milliseconds. Standard library only. Argument: `CopySettings`, as JSON. Input: a `CopyOrder` a
line. Output: a `CopyNews` a line, the first of them LISTENS. `contract/copy_records.py` has these records, and the
names of the files; `copy_transfer.py` moves the bytes.

**Sending.** The newest complete state in the node's folder goes to each node of `CopyPlan.targets`, one after the
other, within the bandwidth. A state that is complete while an older one is on its way goes next, and those between the
two are left out. The ranks know nothing of it, and wait for nothing.

**Receiving.** The files of another node get their names when all of them are here and their checksums agree. Then the
oldest step of the same ranks beyond `CopySettings.keep` is removed. A copy never takes the room that the node's own
states need (`held_copies.py`, which has all that becomes of files on this node).

**Fetching.** Before the ranks of a cycle start, a state that the node lacks comes into its own folder, where the ranks
find it in `load()` and verify it as any other. `memory_files.copied_name` marks where it came from. The launcher waits.

**What must not come back.** States that are set aside are bad. Their copies are removed, and one of the same series
that is still on its way is refused.

It ends when its input does, or when its parent has died: a rank that the launcher has forked may hold the input open.

Threads: the main one reads the orders, and fetches. `ft_copies_send` sends. `ft_copies_listen` accepts connections, and
has a thread `ft_copies_peer` for each, `_MAX_PEERS` at most; the others wait in the kernel's queue.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rank_monitor.contract.copy_records import (
    COPIED,
    FETCHED,
    GET,
    LISTENS,
    MOVED,
    NOT_COPIED,
    PUT,
    CopyAnswer,
    CopyFetch,
    CopyNews,
    CopyOrder,
    CopyPeer,
    CopyPlan,
    CopyRequest,
    CopySettings,
    HeldState,
    copies_name,
)
from rank_monitor.contract.wire.job_secret import read_job_secret
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.proven_link import LinkError
from rank_monitor.copy_transfer import STILL_S, Refused, Transfer, finish
from rank_monitor.held_copies import HeldCopies

_LOOK_S = 0.25
"""Seconds from one look for a new state to the next. A listing takes microseconds."""
_AGAIN_S = 2.0
"""Seconds after which a state is sent again that the other node did not take."""
_MAX_PEERS = 8
"""Connections at once. A node has one or two buddies; after a restart several nodes may fetch from one."""
_PROGRESS = 8 << 20
"""Bytes from one sign of a fetch to the launcher to the next."""


def main() -> None:
    """The program."""
    os.nice(10)  # ranks go first
    settings = read_record(CopySettings, sys.argv[-1])
    secret = None
    if settings.secret_file:
        try:
            secret = read_job_secret(settings.secret_file)
        except ValueError as problem:  # the file was good when the launcher looked at it
            sys.exit(f"ft_launcher: no state is copied: {problem}")
    Copies(settings, secret).run()


class Copies:
    """The copies of one node.

    Args:
        settings: of the job.
        secret: what the secret file has; None: the job has none.
    """

    def __init__(self, settings: CopySettings, secret: bytes | None) -> None:
        self._settings = settings
        self._secret = secret
        self._folder = Path(settings.folder)
        self._held = HeldCopies(self._folder, settings.limit, settings.keep)
        self._plan: CopyPlan | None = None
        """Of the present cycle; None: there is none. The main thread sets it, and the others read it once each time."""
        self._output = threading.Lock()

    def run(self) -> None:
        """Serves until the launcher has gone."""
        self._held.remove_parts()
        server = _listen()
        threading.Thread(target=self._accept, args=(server,), name="ft_copies_listen", daemon=True).start()
        threading.Thread(target=self._send_all, name="ft_copies_send", daemon=True).start()
        self._tell(CopyNews(LISTENS, port=server.getsockname()[1]))
        for line in sys.stdin:
            order = read_record(CopyOrder, line)
            if order.set_aside_from:
                self._held.set_aside(order.set_aside_from)
            if order.is_over:
                self._plan = None
            if order.plan is not None:
                self._begin(order.plan)
        os._exit(0)  # a connection may still be open, and its thread in a long call

    def _begin(self, plan: CopyPlan) -> None:
        """Begins a cycle: fetches what is to be fetched, and has the others work by the plan."""
        self._plan = plan
        self._held.begin(plan.world)
        if plan.fetch is not None:
            self._tell(self._fetch(plan.fetch))

    # Sending.

    def _send_all(self) -> None:
        """The thread `ft_copies_send`."""
        parent = os.getppid()
        sent: dict[CopyPeer, tuple[int, str]] = {}
        again_at: dict[CopyPeer, float] = {}
        while True:
            time.sleep(_LOOK_S)
            if os.getppid() != parent:
                os._exit(0)
            self._held.evict()
            plan = self._plan
            targets: list[CopyPeer] = []
            if plan is not None:
                targets = plan.targets
            for peer in targets:
                state = self._held.newest()
                if state is None or sent.get(peer) == (state.step, state.series):
                    continue
                if time.monotonic() < again_at.get(peer, 0.0):
                    continue
                news = self._send_one(state, peer)
                if news.kind == COPIED:
                    sent[peer] = state.step, state.series
                else:
                    again_at[peer] = time.monotonic() + _AGAIN_S
                self._tell(news)

    def _send_one(self, state: HeldState, peer: CopyPeer) -> CopyNews:
        """Sends a state to a node; returns what became of it."""
        began = time.monotonic()
        size = 0
        try:
            sizes = [(self._folder / name).stat().st_size for name in state.files()]
            size = sum(sizes)
            with _connect(peer) as connection:
                transfer = Transfer(connection, self._settings.job, self._secret, connects=True)
                transfer.say(CopyRequest(PUT, state.step, state.world, state.series, state.ranks, sizes))
                transfer.must_agree()
                transfer.send_files(self._folder, state.files(), _Pace(self._settings.bandwidth))
                transfer.must_agree()
        except Exception as problem:  # the thread must go on, whatever a name or a peer is like
            return CopyNews(NOT_COPIED, step=state.step, size=size, peer=peer.name, reason=_words(problem))
        took_s = round(time.monotonic() - began, 6)
        return CopyNews(COPIED, step=state.step, size=size, took_s=took_s, peer=peer.name)

    # Receiving, and giving back.

    def _accept(self, server: socket.socket) -> None:
        """The thread `ft_copies_listen`."""
        free = threading.Semaphore(_MAX_PEERS)
        while True:
            free.acquire()
            try:
                connection, _ = server.accept()
                threading.Thread(
                    target=self._serve, args=(connection, free.release), name="ft_copies_peer", daemon=True
                ).start()
            except (OSError, RuntimeError):  # no descriptor or no thread is left
                free.release()
                time.sleep(_LOOK_S)

    def _serve(self, connection: socket.socket, is_over: Callable[[], object]) -> None:
        """A thread `ft_copies_peer`: answers one request."""
        try:
            with connection, suppress(LinkError, OSError):
                transfer = Transfer(connection, self._settings.job, self._secret, connects=False)
                request = transfer.hear(CopyRequest)
                try:
                    state = request.state()
                    if state is None:
                        raise Refused("it is no state of a node")
                    if request.work == PUT:
                        self._receive(transfer, state, request.sizes)
                    elif request.work == GET:
                        self._give(transfer, state)
                except Refused as problem:
                    transfer.say(CopyAnswer(str(problem)))
                except OSError as problem:
                    transfer.say(CopyAnswer(f"{problem.filename or self._folder}: {problem.strerror or problem}"))
        except Exception:  # the edge of the thread
            traceback.print_exc()
        finally:
            is_over()

    def _receive(self, transfer: Transfer, state: HeldState, sizes: list[int]) -> None:
        """Takes a state of another node. Raises Refused, LinkError or OSError: it is not here."""
        if len(sizes) != len(state.ranks) or any(size < 0 for size in sizes):
            raise Refused("it has no sizes")
        name = copies_name(state.world, state.ranks)
        folder = self._folder / name
        self._held.begin_arrival(name, folder, state, sum(sizes))
        try:
            transfer.say(CopyAnswer())
            folder.mkdir(mode=0o700, exist_ok=True)
            transfer.receive_files(folder, state.files(), sizes, partial(self._held.arrived, name))
            self._held.end_arrival(state)
        finally:
            self._held.forget_arrival(name)
        transfer.say(CopyAnswer())
        self._held.remove_foreign(self._plan)

    def _give(self, transfer: Transfer, state: HeldState) -> None:
        """Sends a state that another node lacks. Raises Refused, LinkError or OSError."""
        for folder in (self._folder, self._folder / copies_name(state.world, state.ranks)):
            try:
                sizes = [(folder / name).stat().st_size for name in state.files()]
            except FileNotFoundError:
                continue
            transfer.say(CopyAnswer(sizes=sizes))
            transfer.send_files(folder, state.files(), lambda count: None)
            return
        raise Refused(f"{socket.gethostname()} has it no more")

    # Fetching.

    def _fetch(self, fetch: CopyFetch) -> CopyNews:
        """Brings a state into the own folder; returns what became of it."""
        began = time.monotonic()
        asked = CopyRequest(GET, fetch.step, fetch.world, fetch.series, fetch.ranks)
        state, reason = asked.state(), ""
        if state is None:
            return CopyNews(FETCHED, reason="the coordinator has named no state of a node")
        try:
            if self._held.take_own_copy(state):
                return CopyNews(
                    FETCHED, step=state.step, size=self._held.size_of(state), took_s=time.monotonic() - began
                )
        except OSError as problem:
            reason = _words(problem)
        for peer in [*fetch.peers, None, *fetch.peers]:
            if peer is None:  # once more: nodes that exchange their places move files that the other one reads
                time.sleep(_LOOK_S)
                continue
            try:
                self._fetch_from(peer, asked, state)
            except Exception as problem:  # the ranks wait for an answer, whatever a name or a peer is like
                reason = reason or f"{peer.name}: {_words(problem)}"
                continue
            took_s = round(time.monotonic() - began, 6)
            return CopyNews(FETCHED, step=state.step, size=self._held.size_of(state), took_s=took_s, peer=peer.name)
        return CopyNews(FETCHED, reason=reason or "no node has it any more")

    def _fetch_from(self, peer: CopyPeer, asked: CopyRequest, state: HeldState) -> None:
        """Raises Refused, LinkError or OSError: it is not here."""
        with _connect(peer) as connection:
            transfer = Transfer(connection, self._settings.job, self._secret, connects=True)
            transfer.say(asked)
            sizes = transfer.must_agree().sizes
            if len(sizes) != len(state.ranks) or any(size < 0 for size in sizes):
                raise LinkError("the other node has sent no sizes")
            self._held.free_for(sum(sizes), state)
            transfer.receive_files(self._folder, state.files(), sizes, self._progress())
        self._held.make_place(state)
        finish(self._folder, state)

    def _progress(self) -> Callable[[int], None]:
        """Returns a function that tells the launcher now and then how many bytes of a fetch are here."""
        done = told = 0

        def moved(count: int) -> None:
            nonlocal done, told
            done += count
            if done - told >= _PROGRESS:
                told = done
                self._tell(CopyNews(MOVED, size=done))

        return moved

    def _tell(self, news: CopyNews) -> None:
        """Tells the launcher something."""
        with self._output:
            try:
                print(write_record(news), flush=True)
            except OSError:  # it is gone
                os._exit(0)


class _Pace:
    """Waits, so that no more bytes move than a bandwidth allows. Called with the bytes that have moved.

    A delay elsewhere is made up for, by a second's bytes at most.
    """

    def __init__(self, bandwidth: int) -> None:
        self._bandwidth = bandwidth
        self._due = time.monotonic()

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + count / self._bandwidth
        if self._due > now:
            time.sleep(self._due - now)


def _listen() -> socket.socket:
    """Returns a socket that listens at a free port of all addresses, as torch's stores do. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)


def _connect(peer: CopyPeer) -> socket.socket:
    """Returns a connection to another node's process. Raises OSError."""
    return socket.create_connection((peer.address, peer.port), timeout=STILL_S)


def _words(problem: Exception) -> str:
    if isinstance(problem, OSError):
        return f"{problem.filename or 'the other node'}: {problem.strerror or problem}"
    return str(problem)


if __name__ == "__main__":
    main()
