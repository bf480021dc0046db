"""The folder of a node's state in memory, as far as copies go: what is in it, what there is room for, what must go.

`memory_copies.py` has one `HeldCopies`. It says who sends what to whom; here is what becomes of it on this node. The
node's own files lie in the folder itself, where its ranks write them, and the copies for other nodes in folders below
(`contract/copy_records.py: copies_name`). Nothing here knows a connection.

Threads: those of `memory_copies.py` call it at the same time. A lock is held while room is reckoned and files are given
their names or removed; none while bytes are copied.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from rank_monitor.contract import memory_files
from rank_monitor.contract.copy_records import (
    CopyPlan,
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
from rank_monitor.copy_transfer import Refused, finish

_RESERVE = 0.05
"""The part of the tmpfs, and of the memory, that stays free, as for a rank's saves (`ft_client/memory/room.py`)."""
_PASSED = 2
"""States that must have come of each node in a cycle before copies are removed whose ranks now have other buddies. The
first may be the one that was loaded; the second is new."""


class HeldCopies:
    """What a node has in its folder.

    Args:
        folder: of the node's state in memory.
        limit: bytes that all files in it may have.
        keep: how many steps are kept for each node.
    """

    def __init__(self, folder: Path, limit: int, keep: int) -> None:
        self._folder = folder
        self._limit = limit
        self._keep = keep
        self._lock = threading.Lock()
        self._came: Counter[str] = Counter()
        """Name of a folder with copies -> how many states have come there in this cycle."""
        self._arriving: dict[str, int] = {}
        """Name of a folder with copies -> bytes of the state that is arriving there which are not here yet."""
        self._bad: dict[str, int] = {}
        """Series -> its states of this step and later ones are set aside."""

    def begin(self, world: int) -> None:
        """Begins a cycle of a job with so many ranks. Copies of another number of ranks are of no use any more."""
        with self._lock:
            self._came.clear()
        prefix = copies_prefix(world)
        self.remove_copies(lambda name: not name.startswith(prefix))

    def end_arrival(self, state: HeldState) -> None:
        """Gives a state that has been received its names, and removes the oldest of the same ranks.

        Raises:
            Refused: the state was set aside meanwhile.
            OSError: a file cannot be renamed.
        """
        name = copies_name(state.world, state.ranks)
        folder = self._folder / name
        with self._lock:
            self._must_be_good(state)
            _note_order(folder, state)
            finish(folder, state)
            self._came[name] += 1
            for older in _by_age(folder)[: -self._keep]:
                _remove(folder, older)

    def forget_arrival(self, name: str) -> None:
        """Notes that no state is arriving in a folder any more."""
        with self._lock:
            self._arriving.pop(name, None)

    def remove_parts(self) -> None:
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

    def newest(self) -> HeldState | None:
        """Returns the newest complete state in the own folder; None: there is none."""
        with suppress(OSError):
            for state in held_states(os.listdir(self._folder), {}):  # noqa: PTH208 - names, not paths
                return state
        return None

    def arrived(self, name: str, count: int) -> None:
        """Notes that so many bytes are here."""
        with self._lock:
            self._arriving[name] -= count

    def begin_arrival(self, name: str, folder: Path, state: HeldState, size: int) -> None:
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
                limit = size_in_words(self._limit)
                raise Refused(
                    f"step {state.step} has {size_in_words(size)}, and the memory of {socket.gethostname()} has room "
                    f"for {size_in_words(left)} (its --ft-memory-limit is {limit})"
                )
            self._arriving[name] = size

    def _room_left(self) -> int:
        """Returns how many bytes of copies may come. The node's own states go first: `keep` steps, and the one that is
        being written. Called under the lock."""
        own, copies = self._bytes()
        newest = self.newest()
        needed = own
        if newest is not None:
            with suppress(OSError):
                size = sum((self._folder / name).stat().st_size for name in newest.files())
                needed = max(own, (self._keep + 1) * size)
        return self._left(self._limit - needed - copies, needed - own)

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

    def evict(self) -> None:
        """Removes the oldest copies while the node's own files need their room: ranks do not count copies against the
        limit."""
        with self._lock:
            self._evict()

    def _evict(self) -> None:
        """Does what `evict` says. Called under the lock."""
        own, copies = self._bytes()
        while copies and own + copies > self._limit:
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

    def remove_foreign(self, plan: CopyPlan | None) -> None:
        """Removes copies of ranks that send theirs to other nodes now, once all that send here have saved anew: by then
        the others have copies there, too, as all ranks save together."""
        if plan is None or not plan.receives:
            return
        kept = {copies_name(plan.world, ranks) for ranks in plan.receives}
        with self._lock:
            if any(self._came[name] < _PASSED for name in kept):
                return
        self.remove_copies(lambda name: name not in kept)

    def remove_copies(self, is_useless: Callable[[str], bool]) -> None:
        """Removes folders with copies, by their names, but for those to which a state is coming."""
        for folder in self._folders():
            with self._lock:
                is_removed = is_useless(folder.name) and folder.name not in self._arriving
            if is_removed:
                shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, below: int) -> None:
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

    def take_own_copy(self, state: HeldState) -> bool:
        """Moves a copy into the own folder, if this node has it: ranks have moved. Raises OSError."""
        folder = self._folder / copies_name(state.world, state.ranks)
        if state not in _by_age(folder):
            return False
        self.make_place(state)
        for name in state.files():
            (folder / name).rename(self._folder / name)
        return True

    def free_for(self, size: int, state: HeldState) -> None:
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
        return self._left(self._limit - sum(self._bytes()), 0)

    def make_place(self, state: HeldState) -> None:
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

    def size_of(self, state: HeldState) -> int:
        with suppress(OSError):
            return sum((self._folder / name).stat().st_size for name in state.files())
        return 0


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
