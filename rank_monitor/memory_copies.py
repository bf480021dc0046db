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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
    copies_prefix,
    held_states,
    is_copies_name,
)
from rank_monitor.contract.memory_files import UNFINISHED
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.processes import tmpfs
from rank_monitor.contract.processes.cgroup import memory_room
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
_RESERVE = 0.05
"""The part of the tmpfs, and of the memory, that stays free, as for a rank's saves (`ft_client/memory/room.py`)."""
_PROGRESS = 8 << 20
"""Bytes from one sign of a fetch to the launcher to the next."""
_PASSED = 2
"""States that must have come of each node in a cycle before copies are removed whose ranks now have other buddies. The
first may be the one that was loaded; the second is new."""


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
        self._lock = threading.Lock()
        """Held for moments, when the fields below are used."""
        self._plan: CopyPlan | None = None
        self._came: Counter[str] = Counter()
        """Name of a folder with copies -> how many states have come there in this cycle."""
        self._arriving: dict[str, int] = {}
        """Name of a folder with copies -> bytes of the state that is arriving there which are not here yet."""
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
            if order.is_over:
                with self._lock:
                    self._plan = None
            if order.plan is not None:
                self._begin(order.plan)
        os._exit(0)  # a connection may still be open, and its thread in a long call

    def _begin(self, plan: CopyPlan) -> None:
        """Begins a cycle: fetches what is to be fetched, and has the others work by the plan."""
        with self._lock:
            self._plan = plan
            self._came.clear()
        # Of another number of ranks no copy can be fetched any more.
        prefix = copies_prefix(plan.world)
        self._remove_copies(lambda name: not name.startswith(prefix))
        if plan.fetch is not None:
            self._tell(self._fetch(plan.fetch))

    def _remove_parts(self) -> None:
        """Removes what a process before this one had not received, or not removed, as a whole."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                if memory_files.state_file(path.name.removesuffix(UNFINISHED)) and path.name.endswith(UNFINISHED):
                    path.unlink(missing_ok=True)
        for folder in self._folders():
            whole = {name for state in _by_age(folder) for name in state.files()}
            with suppress(OSError):
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
                self._evict()
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
        self._begin_arrival(name, folder, state, sum(sizes))
        try:
            transfer.say(CopyAnswer())
            folder.mkdir(mode=0o700, exist_ok=True)
            transfer.receive_files(folder, state.files(), sizes, partial(self._arrived, name))
            with self._lock:
                self._must_be_good(state)
                _note_order(folder, state)
                finish(folder, state)
                self._came[name] += 1
        finally:
            with self._lock:
                self._arriving.pop(name, None)
        transfer.say(CopyAnswer())
        for older in _by_age(folder)[: -self._settings.keep]:
            _remove(folder, older)
        self._remove_foreign()

    def _arrived(self, name: str, count: int) -> None:
        """Notes that so many bytes are here."""
        with self._lock:
            self._arriving[name] -= count

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
        own, copies = self._bytes()
        newest = self._newest()
        needed = own
        if newest is not None:
            with suppress(OSError):
                size = sum((self._folder / name).stat().st_size for name in newest.files())
                needed = max(own, (self._settings.keep + 1) * size)
        return self._left(self._settings.limit - needed - copies, needed - own)

    def _left(self, of_limit: int, promised: int) -> int:
        """Returns how many bytes may come, by the limit, the tmpfs and the memory of the cgroup, in which a part stays
        free: a DataLoader that finds the tmpfs full dies, and a process that meets the cgroup's limit is killed.

        Args:
            of_limit: what the limit leaves.
            promised: bytes that others may still fill.
        """
        mount = os.statvfs(self._folder)
        free = int((mount.f_bavail - _RESERVE * mount.f_blocks) * mount.f_frsize) - promised
        memory = memory_room()
        if memory is not None:
            free = min(free, int(memory.free - _RESERVE * memory.limit) - promised)
        return max(0, min(of_limit, free) - sum(self._arriving.values()))

    def _bytes(self) -> tuple[int, int]:
        """Returns the bytes of the node's own files, and those of all copies."""
        copies = sum(tmpfs.bytes_in(str(folder)) for folder in self._folders())
        return max(0, tmpfs.bytes_in(str(self._folder)) - copies), copies

    def _evict(self) -> None:
        """Removes the oldest copies while the node's own files need their room: ranks do not count copies against the
        limit. Called under the lock."""
        own, copies = self._bytes()
        while copies and own + copies > self._settings.limit:
            oldest = min(
                ((_came_at(folder, state), folder, state) for folder in self._folders() for state in _by_age(folder)),
                key=lambda found: found[0],
                default=None,
            )
            if oldest is None:
                return
            _remove(oldest[1], oldest[2])
            before = copies
            own, copies = self._bytes()
            if copies >= before:  # the files cannot be removed
                return

    def _must_be_good(self, state: HeldState) -> None:
        """Raises Refused where a state is set aside. Called under the lock."""
        below = self._bad.get(state.series)
        if below is not None and state.step >= below:
            raise Refused(f"states of step {below} and later ones are set aside")

    def _remove_foreign(self) -> None:
        """Removes copies of ranks that send theirs to other nodes now, once all that send here have saved anew: by then
        the others have copies there, too, as all ranks save together."""
        with self._lock:
            plan = self._plan
            if plan is None or not plan.receives:
                return
            kept = {copies_name(plan.world, ranks) for ranks in plan.receives}
            if any(self._came[name] < _PASSED for name in kept):
                return
        self._remove_copies(lambda name: name not in kept)

    def _remove_copies(self, is_useless: Callable[[str], bool]) -> None:
        """Removes folders with copies, by their names, but for those to which a state is coming."""
        for folder in self._folders():
            with self._lock:
                is_removed = is_useless(folder.name) and folder.name not in self._arriving
            if is_removed:
                shutil.rmtree(folder, ignore_errors=True)

    def _set_aside(self, below: int) -> None:
        """Removes copies of bad states, and has no more of them come."""
        with self._lock:
            for folder in [self._folder, *self._folders()]:
                with suppress(OSError):
                    for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
                        file = memory_files.state_file(name)
                        if file is not None and file.step >= below:
                            self._bad[file.series] = min(below, self._bad.get(file.series, below))
                            if folder != self._folder:
                                (folder / name).unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        """Returns the folders with copies."""
        with suppress(OSError):
            names = os.listdir(self._folder)  # noqa: PTH208 - names, not paths
            return [self._folder / name for name in names if is_copies_name(name)]
        return []

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
            if self._take_own_copy(state):
                return CopyNews(FETCHED, step=state.step, size=self._size(state), took_s=time.monotonic() - began)
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
            return CopyNews(FETCHED, step=state.step, size=self._size(state), took_s=took_s, peer=peer.name)
        return CopyNews(FETCHED, reason=reason or "no node has it any more")

    def _take_own_copy(self, state: HeldState) -> bool:
        """Moves a copy into the own folder, if this node has it: ranks have moved. Raises OSError."""
        folder = self._folder / copies_name(state.world, state.ranks)
        if state not in _by_age(folder):
            return False
        self._make_place(state)
        for name in state.files():
            (folder / name).rename(self._folder / name)
        return True

    def _fetch_from(self, peer: CopyPeer, asked: CopyRequest, state: HeldState) -> None:
        """Raises Refused, LinkError or OSError: it is not here."""
        with _connect(peer) as connection:
            transfer = Transfer(connection, self._settings.job, self._secret, connects=True)
            transfer.say(asked)
            sizes = transfer.must_agree().sizes
            if len(sizes) != len(state.ranks) or any(size < 0 for size in sizes):
                raise LinkError("the other node has sent no sizes")
            self._free_for(sum(sizes), state)
            transfer.receive_files(self._folder, state.files(), sizes, self._progress())
        self._make_place(state)
        finish(self._folder, state)

    def _free_for(self, size: int, state: HeldState) -> None:
        """Makes room for a state that is fetched, where there is too little: no rank lives, and all nodes go on from
        this state. Raises Refused, with numbers: there is too little without all others, too."""
        with self._lock:
            for path in sorted(self._folder.glob(f"rank-*{UNFINISHED}")):
                if size > self._left_for_fetch():
                    path.unlink(missing_ok=True)
            for folder in [*self._folders(), self._folder]:
                for older in _by_age(folder):
                    if size > self._left_for_fetch() and (older.step, older.series) != (state.step, state.series):
                        _remove(folder, older)
            left = self._left_for_fetch()
        if size > left:
            raise Refused(
                f"step {state.step} has {size_in_words(size)}, and the memory of this node has room for "
                f"{size_in_words(left)}"
            )

    def _left_for_fetch(self) -> int:
        """Returns how many bytes of a state may be fetched. Called under the lock."""
        return self._left(self._settings.limit - sum(self._bytes()), 0)

    def _make_place(self, state: HeldState) -> None:
        """Prepares the own folder for a state that is brought in: marks that it is a copy, and moves what the node has
        of the same step for other ranks, which it had then, to the copies. In one folder neither would be complete.

        Raises:
            OSError: the mark cannot be made.
        """
        path = self._folder / memory_files.copied_name(state.step, state.series)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
        for own in _by_age(self._folder):
            if (own.step, own.series) == (state.step, state.series) and own.ranks != state.ranks:
                folder = self._folder / copies_name(own.world, own.ranks)
                folder.mkdir(mode=0o700, exist_ok=True)
                for name in own.files():
                    (self._folder / name).rename(folder / name)

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
    """Returns the complete states in a folder, the one that came first at first. By arrival and not by step: after a
    fault the training does steps again."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except OSError:
        return []
    return sorted(held_states([], {"": names}), key=partial(_came_at, folder))


def _came_at(folder: Path, state: HeldState) -> int:
    """Returns when a state came into a folder with copies (`_note_order`)."""
    try:
        return (folder / state.files()[0]).stat().st_mtime_ns
    except OSError:
        return 0


def _note_order(folder: Path, state: HeldState) -> None:
    """Notes at a state that has been received that it came after all others, whatever the clock says meanwhile."""
    path = folder / (state.files()[0] + UNFINISHED)
    last = max((_came_at(folder, other) for other in _by_age(folder)), default=0)
    now = max(time.time_ns(), last + 1)
    os.utime(path, ns=(now, now))


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
