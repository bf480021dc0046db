"""Makes the folder in which ranks keep the training's state in memory, owns it, and removes it at the job's end.

`job_memory.py` calls `JobFolder.open` before the first cycle; `composition.py` passes `variables` to the ranks of each
cycle, and calls `close` when the job has ended on this node. What the ranks write into the folder is theirs
(`rank_monitor/contract/memory_files.py`). After a fault that a bad state may have caused the agent calls `mark`, as the
restart policy has decided for all nodes (`ft_launcher/decide/policy/bad_state.py`).

**A job never fails for it.** Where there can be no folder, `refused` says why, in one line with what to do, and the
training goes on without.

**After a death.** Where a launcher is killed, `close` is not called. `rank_monitor/memory_linger.py` then gives the
files their time. `adoption.py` decides whether the next start takes them over. Before it does, it kills what is left of
the dead launcher's processes: no rank of that job may write while a rank of this one reads.

**Folders of others.** `open` also removes this user's folders of other jobs whose launchers are dead and whose time is
over. To free their memory takes seconds.

**The end.** `close` only renames a large folder, so that the end of the job is recorded without a wait. `free` then
frees the memory: whatever kills what has outlived the launcher, nothing is left of a job that has ended in order. After
a scheduler's signal the launcher has seconds to end, and `free` leaves the rest: the launcher's goodbye names it to the
sweeper, which frees the memory (`rank_monitor/memory_linger.py: after_goodbye`). No file of the runtime folder is read
for that: its file system may not answer.

Threads, both daemons: `ft_memory_sweep` removes folders of others, and touches these only. `ft_memory_alive` notes in
the own folder that this launcher lives, also while the launcher waits for a node between two cycles; `close` ends this
thread before it gives up the folder.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ft_launcher.node.memory_files import node_memory
from ft_launcher.node.memory_files.adoption import Adoption, adoption, is_over, left_behind, names_for, of_user
from ft_launcher.node.memory_files.copies import CopyProcess
from ft_launcher.node.memory_files.flush import Flush
from ft_launcher.node.memory_files.node_memory import NodeMemory
from ft_launcher.node.processes.process_tree import start_ticks
from rank_monitor.contract import env
from rank_monitor.contract.copy_records import CopySettings
from rank_monitor.contract.memory_files import (
    AUTO,
    OWNER_NAME,
    MemoryFiles,
    no_save_name,
    no_save_until,
    set_aside_from,
    set_aside_name,
)
from rank_monitor.contract.memory_room import default_limit, size_in_words
from rank_monitor.contract.processes import memory_folder, proc, runtime_folder, tmpfs
from rank_monitor.contract.processes.cgroup import memory_room
from rank_monitor.contract.processes.memory_folder import NotOwn, OwnedFolder, Owner, now_s
from rank_monitor.contract.processes.sweep import sweep
from rank_monitor.contract.settings.config import MemorySettings
from rank_monitor.contract.wire.json_record import write_record
from rank_monitor.contract.wire.launcher_messages import NOTHING_LEFT

logger = logging.getLogger(__name__)

_END_S = 10.0
"""Seconds to wait for the end of a dead launcher's processes, which were killed. One that waits in the kernel may take
longer."""
_ALIVE_S = 30.0
"""Seconds from one note that this launcher lives to the next, at most. By so much a launcher may seem to have been dead
for longer where all of its processes were killed at once."""
REMOVED_AT_ONCE = 64 << 20
"""Bytes that are freed within 10 ms: a folder with less needs no other process."""
_NAME_ANOTHER = "Name another tmpfs by --ft-memory-dir"


class JobFolder:
    """The folder of one job on this node, or the reason why there is none. Made by `open`; without that there is none,
    and the ranks are told so: they may be in a rank of another job, and have its variables.

    Attributes:
        refused: why there is no folder, in one line; empty: there is one.
        found: what became of an earlier start's folder; None: there was none.
        flush: what the job has on shared storage; None: the user wants nothing there, or another launcher of the same
            key lives on this machine.
        copies: has the states copied to other nodes; None: the user wants no copies, or the job has one node.
        below: states of this step and later ones were set aside last; 0: none was.
    """

    def __init__(self, settings: MemorySettings, tag: str) -> None:
        self.refused = ""
        self.found: Adoption | None = None
        self.flush: Flush | None = None
        self.copies: CopyProcess | None = None
        self.below = 0
        self._is_second = False
        """Whether another launcher of the same key had its folder before."""
        self._settings = settings
        self._tag = tag
        self._owned: OwnedFolder | None = None
        self._limit = 0
        self._no_save: set[str] = set()
        """The names of the marks in the folder until when nothing is saved. Only the one with the latest step is
        kept."""
        self._aside: list[Path] = []
        """Folders that are renamed already, and whose memory is to be freed."""
        self._left: Path | None = None
        """What `close` has renamed, until its memory is freed; None: there is nothing."""
        self._is_closed = threading.Event()
        self._notes: threading.Thread | None = None

    @classmethod
    def open(cls, settings: MemorySettings, key: str, tag: str, runtime: Path) -> JobFolder:
        """Makes the folder of the job, or takes over what an earlier start left.

        Blocks for 0.1 s where an earlier start is taken over, and for up to 10 s where a process of it does not end.

        Args:
            settings: of this launcher.
            key: tells the job from others (`adoption.job_key`).
            tag: of this job's processes.
            runtime: the runtime folder, by which the monitors find the folder after this launcher's death.
        """
        folder = cls(settings, tag)
        top = Path(settings.memory_dir).absolute()
        try:
            folder._open(top, key, runtime)
            folder._begin_notes()
        except OSError as error:
            folder.refused = f"{error.filename or top}: {_words(error)}. {_NAME_ANOTHER}"
            folder.close()
        folder._begin_sweep(top)
        return folder

    @property
    def path(self) -> Path | None:
        """Where the folder is; None: there is none."""
        if self._owned is None:
            return None
        return self._owned.path

    def variables(self) -> Mapping[str, str]:
        """Returns the variables by which the ranks find the folder."""
        interval = self._settings.memory_interval
        if not isinstance(interval, int):
            interval = AUTO
        files = MemoryFiles(
            folder=str(self.path or ""),
            keep=self._settings.memory_keep,
            limit=self._limit,
            interval=interval,
            refused=self.refused,
        )
        return {env.MEMORY_FILES: write_record(files)}

    def use_storage(self, storage: str, key: str, command: str) -> None:
        """Has the state brought back from shared storage at the start, and written there at the end.

        Args:
            storage: the folder of `--ft-memory-flush`.
            key: of the job, without the number of the node.
            command: tells the command of the job from others.
        """
        if self._owned is not None and not self._is_second:
            self.flush = Flush(Path(storage).absolute(), key, command, self._owned.path, self._limit)

    def use_buddies(self, job: str, secret_file: str, buddies: int, bandwidth: int) -> None:
        """Has the states copied to other nodes, and brought back from them.

        Args:
            job: the name of the job, the same on all nodes.
            secret_file: `--ft-job-secret-file`; empty: there is none.
            buddies: on how many other nodes.
            bandwidth: bytes a second, to all of them together.
        """
        if self._owned is not None:
            folder, keep = str(self._owned.path), self._settings.memory_keep
            self.copies = CopyProcess(CopySettings(folder, self._limit, keep, bandwidth, job, secret_file), buddies)
            self.copies.start()

    def pids(self) -> set[int]:
        """Returns the pids of processes that work for the state in memory now, or have been left behind on shared
        storage."""
        found: set[int] = set()
        if self.flush is not None:
            found |= self.flush.pids()
        if self.copies is not None:
            found |= self.copies.pids()
        return found

    def state(self, since_ns: int) -> NodeMemory | None:
        """Returns what the ranks keep in the folder now; None: there is no folder, or it cannot be read. Any thread may
        ask. Takes 0.1 ms for a node of eight ranks.

        Args:
            since_ns: the start of the ranks (monotonic nanoseconds). What ranks before them have noted does not count.
        """
        path = self.path
        if path is None:
            return None
        with suppress(OSError):
            return node_memory.read(path, self._limit, since_ns)
        return None

    def note_alive(self) -> None:
        """Notes in the folder that this launcher lives: where every process of the job is killed at once, nobody is
        left to note when."""
        if self._owned is not None:
            with suppress(OSError):
                self._owned.write(self._record())

    def mark(self, set_aside_from: int, until: int) -> None:
        """Marks in the folder which states the ranks of the next cycle must not use, and until when they save none.

        Called on the agent's thread between two cycles, when no rank lives. A mark is an empty file with a name that
        says all, so that a mark is there or is not, also for a launcher that adopts the folder; making one takes
        microseconds, and lists or frees nothing.

        Args:
            set_aside_from: states of this step and later ones are not used; 0: nothing changes.
            until: nothing is saved before the training has passed this step, nor a later one that was marked before; 0:
                nothing changes.
        """
        if self._owned is None:
            return
        try:
            if set_aside_from:
                self.below = set_aside_from
                _make_empty(self._owned.path / set_aside_name(set_aside_from))
                if self.flush is not None:
                    self.flush.remove(set_aside_from)
                if self.copies is not None:
                    self.copies.set_aside(set_aside_from)
            if until:
                self._no_save.add(no_save_name(until))
                _make_empty(self._owned.path / no_save_name(until))
                for name in [name for name in self._no_save if no_save_until([name]) < no_save_until(self._no_save)]:
                    (self._owned.path / name).unlink(missing_ok=True)
                    self._no_save.remove(name)
        except OSError as error:
            logger.warning(
                "%s: %s. The state in memory of a failed cycle cannot be marked as bad, and may be used again",
                error.filename or self._owned.path,
                _words(error),
            )

    def marked_from(self) -> int | None:
        """Returns the step from which on states are set aside, if no rank has looked for a state since; else None."""
        if self._owned is None:
            return None
        try:
            return set_aside_from(self._owned.names())
        except OSError:
            return None

    def close(self) -> None:
        """Removes the folder with all that is in it. A large one is only renamed: `free` or the sweeper frees its
        memory."""
        self._is_closed.set()
        if self.copies is not None:
            self.copies.close()
        if self._notes is not None:
            self._notes.join()
            self._notes = None
        if self._owned is None:
            return
        owned, self._owned = self._owned, None
        with suppress(OSError):
            self._left = owned.set_aside()
            if tmpfs.bytes_in(str(self._left)) <= REMOVED_AT_ONCE:
                self.free(lambda: False)

    def free(self, is_told_to_end: Callable[[], bool]) -> None:
        """Frees the memory of what `close` has renamed. Blocks for as long as that takes: a second for each 5 to 10
        GiB.

        Args:
            is_told_to_end: whether this launcher has got a signal to end: what is left then is left to the sweeper.
                Asked before each file.
        """
        if self._left is None:
            return
        for top, _, names in os.walk(self._left):
            for name in names:
                if is_told_to_end():
                    return
                with suppress(OSError):
                    Path(top, name).unlink()
        memory_folder.remove_aside(self._left)
        self._left = None

    def goodbye(self) -> bytes:
        """Returns the goodbye to the sweeper, which frees what is left."""
        if self._left is None:
            return NOTHING_LEFT
        return os.fsencode(self._left)

    def _open(self, top: Path, key: str, runtime: Path) -> None:
        """Does what `open` says, whose arguments `key` and `runtime` are. `top`: where the folder is to be.

        Raises:
            OSError: there can be no folder. `filename` says which one is meant.
        """
        kind = tmpfs.kind_of(str(top))
        if kind != tmpfs.KIND:
            kind = kind or "unknown"
            raise OSError(errno.ENOTSUP, f"it is on a file system of kind {kind}, and only a tmpfs is memory", str(top))
        mount = os.statvfs(top)
        size = mount.f_blocks * mount.f_frsize
        self._limit = self._settings.memory_limit or default_limit(size, memory_room())
        self._owned = self._claim(top, names_for(key))
        self._owned.write(self._record())
        with suppress(OSError):  # without the link nobody removes the folder in time after a death
            runtime_folder.link_state_in_memory(runtime, self._owned.path)

    def _claim(self, top: Path, names: Sequence[str]) -> OwnedFolder:
        """Returns the first folder of `names` that no living launcher owns, with what is taken over in it, else empty.

        A name under which something lies that is not this user's is left alone: any user can make a folder with the
        name of somebody else's job.

        Raises:
            OSError: it cannot be made.
        """
        refused: NotOwn | None = None
        for name in names:
            path = top / name
            try:
                owned = memory_folder.make(path)
            except NotOwn as problem:
                refused = problem
                logger.info("%s is not used: %s", path, _words(problem))
                continue
            if owned is None and self._ends_left_over(path):
                owned = memory_folder.make(path)
            if owned is None:
                continue
            self._is_second = name != names[0]
            owner = owned.read()
            if owner is not None:
                sweep(owner.tag, _END_S)
            names_there = set(owned.names()) - {OWNER_NAME}
            if owner is None and not names_there:  # just made
                return owned
            self.found = adoption(left_behind(owner, names_there, _boot(), now_s(), self._settings.memory_linger))
            if self.found.step is not None:
                self._no_save = {name for name in names_there if no_save_until([name])}
                return owned
            self._aside.append(owned.set_aside())
            again = memory_folder.make(path)
            if again is not None:
                return again
        if refused is not None:
            raise refused
        raise OSError(errno.EBUSY, f"{len(names)} launchers of this job have a folder there already", str(top))

    def _ends_left_over(self, path: Path) -> bool:
        """Kills what a dead launcher left running, where that still holds the folder's lock: a rank that was forked has
        the launcher's descriptors. Returns whether the launcher is dead."""
        owner = memory_folder.read_owner(path)
        if owner is None or owner.pids not in ("", _pids()):
            return False  # in another container its process has another pid, and may well live
        if start_ticks(owner.pid) == owner.started:
            return False
        sweep(owner.tag, _END_S)
        return True

    def _record(self) -> Owner:
        return Owner(
            tag=self._tag,
            pid=os.getpid(),
            started=int(start_ticks(os.getpid())),
            boot=_boot(),
            seen_s=now_s(),
            linger_s=self._settings.memory_linger,
            pids=_pids(),
        )

    def _begin_notes(self) -> None:
        """Starts the thread that notes that this launcher lives."""
        self._notes = threading.Thread(target=self._note_until_closed, name="ft_memory_alive", daemon=True)
        try:
            self._notes.start()
        except RuntimeError:  # a limit of processes: after a death of all processes the files' time ends sooner
            self._notes = None

    def _note_until_closed(self) -> None:
        """The thread's function. The time from one note to the next is short beside the time that the files have."""
        while not self._is_closed.wait(min(_ALIVE_S, max(1.0, self._settings.memory_linger / 10))):
            self.note_alive()

    def _begin_sweep(self, top: Path) -> None:
        """Starts the removal of what others left, in a thread, if there is anything. Does not wait for it."""
        with suppress(OSError, RuntimeError):  # RuntimeError: a limit of processes; the next launcher does it
            others, aside = of_user(os.listdir(top), os.geteuid())  # noqa: PTH208 - names, not paths
            if self.path is not None:
                others = [name for name in others if name != self.path.name]
            self._aside += [top / name for name in aside]
            if not others and not self._aside:
                return
            # A daemon: the launcher's end must not wait for it. The next launcher goes on with what is left.
            threading.Thread(
                target=_sweep, args=([top / name for name in others], self._aside), name="ft_memory_sweep", daemon=True
            ).start()


def _sweep(others: Sequence[Path], aside: Sequence[Path]) -> None:
    """The thread's function: removes folders whose launchers are dead and whose time is over.

    Args:
        others: folders of this user that may be owned.
        aside: folders whose removal has begun.
    """
    for path in others:
        owned = memory_folder.take(path)
        if owned is None:
            continue
        try:
            if is_over(owned.read(), _boot(), now_s()):
                gone = owned.set_aside()
                held = tmpfs.bytes_in(str(gone))
                memory_folder.remove_aside(gone)
                logger.info("removed %s (%s), whose launcher is dead and whose time is over", path, size_in_words(held))
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, _words(error))
        finally:
            owned.release()
    for path in aside:
        memory_folder.remove_aside(path)


def _make_empty(path: Path) -> None:
    """Makes an empty file, if there is none. Raises OSError: it cannot be made."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))


def _pids() -> str:
    """Returns what tells the set of pids of this container from others; empty: unknown."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a text, not a path
    return ""


def _boot() -> str:
    return proc.boot_id().decode(errors="replace").strip()


def _words(error: OSError) -> str:
    return error.strerror or str(error)
