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
states need (`_room_left`).

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
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rank_monitor.contract import memory_files
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
    held_states,
    is_copies_name,
)
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.processes import tmpfs
from rank_monitor.contract.wire.job_secret import read_job_secret
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.proven_link import LinkError
from rank_monitor.copy_transfer import STILL_S, Refused, Transfer, finish

_LOOK_S = 0.25
"""Seconds from one look for a new state to the next. A listing takes microseconds."""
_AGAIN_S = 2.0
"""Seconds after which a state is sent again that the other node did not take."""
_MAX_PEERS = 8
"""Connections at once. A node has one or two buddies; after a restart several nodes may fetch from one."""
_FREE = 0.95
"""The share of the free memory of the tmpfs that is filled at most, as for a rank's saves."""
_PROGRESS = 8 << 20
"""Bytes from one sign of a fetch to the launcher to the next."""
_PASSED = 2
"""Steps that must have come in a cycle before copies are removed whose ranks now have other buddies: by then these have
one, too, as all ranks save together."""


def main() -> None:
    """The program."""
    os.nice(10)  # ranks go first
    settings = read_record(CopySettings, sys.argv[-1])
    secret = None
    if settings.secret_file:
        secret = read_job_secret(settings.secret_file)
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
        self._lock = threading.Lock()
        """Held for moments, when the fields below are used."""
        self._plan: CopyPlan | None = None
        self._came = 0
        """How many states have come in this cycle."""
        self._arriving: dict[str, int] = {}
        """Name of a folder with copies -> bytes of the state that is arriving there."""
        self._bad: dict[str, int] = {}
        """Series -> its states of this step and later ones are set aside."""
        self._output = threading.Lock()

    def run(self) -> None:
        """Serves until the launcher has gone."""
        self._remove_parts()
        server = _listen()
        threading.Thread(target=self._accept, args=(server,), name="ft_copies_listen", daemon=True).start()
        threading.Thread(target=self._send_all, name="ft_copies_send", daemon=True).start()
        self._tell(CopyNews(LISTENS, port=server.getsockname()[1]))
        for line in sys.stdin:
            order = read_record(CopyOrder, line)
            if order.set_aside_from:
                self._set_aside(order.set_aside_from)
            if order.plan is not None:
                with self._lock:
                    self._plan, self._came = order.plan, 0
                if order.plan.fetch is not None:
                    self._tell(self._fetch(order.plan.fetch))
        os._exit(0)  # a connection may still be open, and its thread in a long call

    def _remove_parts(self) -> None:
        """Removes what a process before this one had not received, or not removed, as a whole."""
        for folder in self._folders():
            whole = {name for state in _by_age(folder) for name in state.files()}
            for path in folder.iterdir():
                if path.name not in whole:
                    path.unlink(missing_ok=True)

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
            with self._lock:
                targets = self._plan.targets if self._plan is not None else []
            for peer in targets:
                state = self._newest()
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

    def _newest(self) -> HeldState | None:
        """Returns the newest complete state in the own folder; None: there is none."""
        with suppress(OSError):
            for state in held_states(os.listdir(self._folder), {}):  # noqa: PTH208 - names, not paths
                return state
        return None

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
        except (Refused, LinkError, OSError) as problem:
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
        self._begin_arrival(name, folder, state, sum(sizes))
        try:
            transfer.say(CopyAnswer())
            folder.mkdir(mode=0o700, exist_ok=True)
            transfer.receive_files(folder, state.files(), sizes, lambda count: None)
            with self._lock:
                self._must_be_good(state)
                finish(folder, state)
                self._came += 1
                plan = self._plan if self._came >= _PASSED else None
        finally:
            with self._lock:
                self._arriving.pop(name, None)
        transfer.say(CopyAnswer())
        self._remove_old(folder)
        if plan is not None:
            self._remove_foreign(state.world, plan.receives)

    def _begin_arrival(self, name: str, folder: Path, state: HeldState, size: int) -> None:
        """Notes that a state arrives. Raises Refused: it may not, with numbers where there is no room."""
        with self._lock:
            self._must_be_good(state)
            if name in self._arriving:
                raise Refused("another state of the same ranks is arriving")
            left = self._room_left()
            kept = _by_age(folder)
            while size > left and len(kept) > 1:  # rather one step of a node than none that is new
                _remove(folder, kept.pop(0))
                left = self._room_left()
            if size > left:
                limit = size_in_words(self._settings.limit)
                raise Refused(
                    f"step {state.step} has {size_in_words(size)}, and the memory of {socket.gethostname()} has room "
                    f"for {size_in_words(left)} (its --ft-memory-limit is {limit})"
                )
            self._arriving[name] = size

    def _room_left(self) -> int:
        """Returns how many bytes of copies may come. The node's own states go first: `keep` steps, and the one that is
        being written. Called under the lock."""
        copies = 0
        for name in os.listdir(self._folder):  # noqa: PTH208 - names, not paths
            if is_copies_name(name):
                copies += tmpfs.bytes_in(str(self._folder / name))
        own = tmpfs.bytes_in(str(self._folder)) - copies
        newest = self._newest()
        needed = own
        if newest is not None:
            with suppress(OSError):
                size = sum((self._folder / name).stat().st_size for name in newest.files())
                needed = max(own, (self._settings.keep + 1) * size)
        arriving = sum(self._arriving.values())
        mount = os.statvfs(self._folder)
        free = int(mount.f_bavail * mount.f_frsize * _FREE) - (needed - own)
        return max(0, min(self._settings.limit - needed - copies, free) - arriving)

    def _must_be_good(self, state: HeldState) -> None:
        """Raises Refused where a state is set aside. Called under the lock."""
        below = self._bad.get(state.series)
        if below is not None and state.step >= below:
            raise Refused(f"states of step {below} and later ones are set aside")

    def _remove_old(self, folder: Path) -> None:
        """Removes the oldest states of a folder with copies, by their arrival, beyond those that are kept."""
        for state in _by_age(folder)[: -self._settings.keep]:
            _remove(folder, state)

    def _remove_foreign(self, world: int, receives: list[list[int]]) -> None:
        """Removes copies of ranks that send theirs to other nodes now."""
        kept = {copies_name(world, ranks) for ranks in receives}
        for name in os.listdir(self._folder):  # noqa: PTH208 - names, not paths
            with self._lock:
                is_foreign = is_copies_name(name) and name not in kept and name not in self._arriving
            if is_foreign:
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def _set_aside(self, below: int) -> None:
        """Removes copies of bad states, and has no more of them come."""
        with self._lock:
            for folder in [self._folder, *self._folders()]:
                for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
                    file = memory_files.state_file(name)
                    if file is not None and file.step >= below:
                        self._bad[file.series] = min(below, self._bad.get(file.series, below))
                        if folder != self._folder:
                            (folder / name).unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        """Returns the folders with copies."""
        names = os.listdir(self._folder)  # noqa: PTH208 - names, not paths
        return [self._folder / name for name in names if is_copies_name(name)]

    def _give(self, transfer: Transfer, state: HeldState) -> None:
        """Sends a state that another node lacks. Raises Refused, LinkError or OSError."""
        for folder in (self._folder, self._folder / copies_name(state.world, state.ranks)):
            with suppress(FileNotFoundError):
                sizes = [(folder / name).stat().st_size for name in state.files()]
                transfer.say(CopyAnswer(sizes=sizes))
                transfer.send_files(folder, state.files(), lambda count: None)
                return
        raise Refused(f"{socket.gethostname()} has it no more")

    # Fetching.

    def _fetch(self, fetch: CopyFetch) -> CopyNews:
        """Brings a state into the own folder; returns what became of it."""
        began = time.monotonic()
        state = HeldState(fetch.step, fetch.world, fetch.series, fetch.ranks, is_own=True)
        reason = ""
        try:
            if self._take_own_copy(state):
                return CopyNews(FETCHED, step=state.step, size=self._size(state), took_s=time.monotonic() - began)
        except OSError as problem:
            reason = _words(problem)
        for peer in fetch.peers:
            try:
                self._fetch_from(peer, state)
            except (Refused, LinkError, OSError) as problem:
                reason = reason or f"{peer.name}: {_words(problem)}"
                continue
            took_s = round(time.monotonic() - began, 6)
            return CopyNews(FETCHED, step=state.step, size=self._size(state), took_s=took_s, peer=peer.name)
        return CopyNews(FETCHED, reason=reason or "no node has it any more")

    def _take_own_copy(self, state: HeldState) -> bool:
        """Moves a copy into the own folder, if this node has it: ranks have moved. Raises OSError."""
        folder = self._folder / copies_name(state.world, state.ranks)
        if state not in [replace(found, is_own=True) for found in _by_age(folder)]:
            return False
        self._mark(state)
        for name in state.files():
            (folder / name).rename(self._folder / name)
        return True

    def _fetch_from(self, peer: CopyPeer, state: HeldState) -> None:
        """Raises Refused, LinkError or OSError: it is not here."""
        with _connect(peer) as connection:
            transfer = Transfer(connection, self._settings.job, self._secret, connects=True)
            transfer.say(CopyRequest(GET, state.step, state.world, state.series, state.ranks))
            sizes = transfer.must_agree().sizes
            if len(sizes) != len(state.ranks) or any(size < 0 for size in sizes):
                raise LinkError("the other node has sent no sizes")
            mount = os.statvfs(self._folder)
            left = self._settings.limit - tmpfs.bytes_in(str(self._folder))
            left = max(0, min(left, int(mount.f_bavail * mount.f_frsize * _FREE)))
            if sum(sizes) > left:
                raise Refused(
                    f"step {state.step} has {size_in_words(sum(sizes))}, and the memory of this node has room for "
                    f"{size_in_words(left)}"
                )
            transfer.receive_files(self._folder, state.files(), sizes, self._progress())
        self._mark(state)
        finish(self._folder, state)

    def _mark(self, state: HeldState) -> None:
        """Marks that a state in the own folder is a copy. Raises OSError."""
        path = self._folder / memory_files.copied_name(state.step, state.series)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))

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

    def _size(self, state: HeldState) -> int:
        with suppress(OSError):
            return sum((self._folder / name).stat().st_size for name in state.files())
        return 0

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


def _by_age(folder: Path) -> list[HeldState]:
    """Returns the complete states in a folder with copies, the one that came first at first. By arrival and not by
    step: after a fault the training does steps again."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except OSError:
        return []

    def came_at(state: HeldState) -> int:
        try:
            return (folder / state.files()[0]).stat().st_mtime_ns
        except OSError:
            return 0

    return sorted(held_states([], {"": names}), key=came_at)


def _remove(folder: Path, state: HeldState) -> None:
    for name in state.files():
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


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
