"""The files of one rank in the node's folder: which one is written next, and their mappings.

A rank has `keep + 1` files: so many complete generations, and the one that is being written. Files are used again and
again, and stay mapped: a new file costs 7 to 12 times as much as the copy of the same bytes into a kept mapping, since
the kernel must find and clear each page. A rank also takes over the files that a process before it with the same number
has left.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ft_client.memory import room
from rank_monitor.contract import memory_files
from rank_monitor.contract.copy_records import is_copies_name
from rank_monitor.contract.memory_files import MemoryFiles, StateFile
from rank_monitor.contract.processes import rank_progress, tmpfs
from rank_monitor.contract.processes.cgroup import memory_room

_PERMISSIONS = 0o600
_SLOT = re.compile(r"rank-(\d{1,9})_slot-(\d{1,9})" + re.escape(memory_files.UNFINISHED))
"""What `memory_files.unfinished_name` makes."""


class MarkedStep(Protocol):
    """What names a generation, of this job or of one with another number of ranks."""

    @property
    def step(self) -> int: ...

    @property
    def series(self) -> str: ...


class StoredFile:
    """One file of this rank, which is open.

    Args:
        path: of the file, which is made where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.descriptor = os.open(path, flags, _PERMISSIONS)
        self.mapping: mmap.mmap | None = None
        """The file's bytes; None: the file is not mapped yet."""
        self._allocated = 0
        """So many bytes are known to have memory behind them."""

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def allocate(self, size: int) -> None:
        """Makes sure that the file has `size` bytes, with memory behind each, so that no write into the mapping is ever
        a SIGBUS.

        Raises:
            OSError: there is no room.
        """
        # Of a large file even a look at pages that are there takes time, so it is done once.
        if size > self._allocated:
            os.posix_fallocate(self.descriptor, self._allocated, size - self._allocated)
            self._allocated = size

    def truncate(self, size: int) -> None:
        """Cuts off what is behind the first `size` bytes: what a larger state has left."""
        if self.size() != size:
            os.ftruncate(self.descriptor, size)
            self._allocated = min(self._allocated, size)

    def map(self, size: int) -> mmap.mmap:
        """Returns a mapping of at least the first `size` bytes, which must be allocated."""
        if self.mapping is None or len(self.mapping) < size:
            # The pages are mapped at once, not by one fault for each.
            self.mapping = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self.mapping

    def rename(self, name: str) -> None:
        """Gives the file another name in its folder."""
        path = self.path.with_name(name)
        self.path.rename(path)
        self.path = path

    def close(self) -> None:
        """Closes the file. The mapping ends with the last tensor that lies in it."""
        os.close(self.descriptor)
        self.mapping = None


class RankFiles:
    """The files of this rank.

    Args:
        settings: what the launcher says.
        rank: of this rank in the job.
    """

    def __init__(self, settings: MemoryFiles, rank: int) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._rank = rank
        self._open: dict[str, StoredFile] = {}
        """By present name."""

    def keep_only(self, generations: Collection[MarkedStep]) -> None:
        """Makes every whole file of this rank unfinished, but those of the generations given.

        Called once all ranks have agreed where they go on, before the first save. A file of a later step would be mixed
        with what others save of that step now.
        """
        kept = {(generation.step, generation.series) for generation in generations}
        for file in self._whole(self._names()):
            if (file.step, file.series) not in kept:
                self._make_unfinished(file.name)
        names = self._names()
        own = sorted(name for name in names if self._slot_of(name) is not None)
        own += [file.name for file in self._whole(names)]
        # There are more of them than needed where the launcher was started again with a smaller `--ft-memory-keep`.
        for name in own[: -(self._settings.keep + 1)]:
            (self._folder / name).unlink()

    def remove_others(self, ranks: Collection[int], kept: Collection[MarkedStep] = ()) -> None:
        """Removes the files of ranks that the node does not have any more: those of a job with more ranks.

        Called once all have agreed where they go on, by one rank of the node or by several.

        Args:
            ranks: of the node.
            kept: whose whole files stay for now, as the job has no generation of its own yet.
        """
        stay = {(found.step, found.series) for found in kept}
        for name in self._names():
            file = memory_files.state_file(name)
            is_kept = file is not None and (file.step, file.series) in stay
            if _rank_of(name) not in (None, *ranks) and not is_kept:
                (self._folder / name).unlink(missing_ok=True)

    def remove_useless(self) -> None:
        """Removes all files of this rank but those of complete generations. Called where no rank saves any more: no
        generation will ever be complete with them, and their memory is the node's again."""
        names = self._names()
        complete = {(found.step, found.series) for found in memory_files.complete_generations(names)}
        useless = [name for name in names if self._slot_of(name) is not None]
        useless += [file.name for file in self._whole(names) if (file.step, file.series) not in complete]
        self.close()
        for name in useless:
            (self._folder / name).unlink(missing_ok=True)

    def make_unfinished(self, series: str, step: int | None = None) -> None:
        """Makes this rank's files of a series unfinished: their generations are not to be used.

        `step`: of the only generation that is meant.
        """
        for file in self._whole(self._names()):
            if file.series == series and step in (None, file.step):
                self._make_unfinished(file.name)

    def make_unfinished_but(self, world: int) -> None:
        """Makes this rank's files of jobs with other numbers of ranks than `world` unfinished."""
        for file in self._whole(self._names()):
            if file.world != world:
                self._make_unfinished(file.name)

    def next_file(self, size: int) -> StoredFile:
        """Returns a file to write into, which has no good name any more.

        Called when all ranks have finished their last saves. So each whole file belongs to a complete generation, and
        the oldest one may be written again.

        Args:
            size: bytes that will be written.

        Raises:
            NoRoom: the files do not fit.
            OSError: the folder is gone, or the like.
        """
        names = self._names()
        unfinished = sorted(name for name in names if self._slot_of(name) is not None)
        if unfinished:
            return self._opened(unfinished[0])
        whole = self._whole(names)
        if len(whole) <= self._settings.keep:
            return self._make_files(self._settings.keep + 1 - len(whole), size)
        return self._opened(self._make_unfinished(whole[0].name))

    def promise(self, file: StoredFile, size: int) -> None:
        """Accounts for the room for `size` bytes in a file that was used before: other ranks count it from now on.

        Raises:
            NoRoom: the files do not fit.
        """
        if file.size() < size:
            with self._lock():
                self._check_room(size)
                os.ftruncate(file.descriptor, size)

    def grow(self, file: StoredFile, size: int) -> None:
        """Makes sure that a file that was used before has room for `size` bytes, and memory behind them.

        Raises:
            NoRoom: the files do not fit.
            OSError: there is no memory.
        """
        self.promise(file, size)
        file.allocate(size)

    def map_all(self, size: int) -> None:
        """Maps each file of this rank that is not mapped yet, so that later saves find all pages there.

        `size`: of the files that will be written.

        Raises:
            NoRoom: the files do not fit.
            OSError: there is no memory.
        """
        names = self._names()
        own = [name for name in names if self._slot_of(name) is not None]
        for name in [*own, *(file.name for file in self._whole(names))]:
            file = self._opened(name)
            if name in own:
                self.grow(file, size)
            if file.mapping is None:
                file.map(file.size())

    def give_name(self, file: StoredFile, name: StateFile) -> None:
        """Renames a file whose content is whole."""
        before = file.path.name
        file.rename(name.name)
        del self._open[before]
        self._open[name.name] = file

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _make_files(self, count: int, size: int) -> StoredFile:
        """Makes `count` files and returns one of them. They have their size at once, and memory when they are written:
        so other ranks see how much is promised."""
        with self._lock():
            self._check_room(size)
            for _ in range(count):
                file = self._opened(memory_files.unfinished_name(self._rank, self._free_slot()))
                os.ftruncate(file.descriptor, size)
        return file

    def _names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()]

    def _whole(self, names: list[str]) -> list[StateFile]:
        """Returns the whole files of this rank, ascending by step."""
        found = [file for file in map(memory_files.state_file, names) if file is not None and file.rank == self._rank]
        return sorted(found, key=lambda file: file.step)

    def _slot_of(self, name: str) -> int | None:
        """Returns the slot in the name of an unfinished file of this rank; None: the name is not one."""
        found = _SLOT.fullmatch(name)
        if found is None or int(found[1]) != self._rank:
            return None
        return int(found[2])

    def _free_slot(self) -> int:
        taken = {self._slot_of(name) for name in self._names()}
        return min(set(range(len(taken) + 1)) - taken)

    def _make_unfinished(self, name: str) -> str:
        """Renames a whole file to an unfinished one: its content counts no more. Returns its name then."""
        unfinished = memory_files.unfinished_name(self._rank, self._free_slot())
        file = self._open.pop(name, None)
        if file is None:
            (self._folder / name).rename(self._folder / unfinished)
        else:
            file.rename(unfinished)
            self._open[unfinished] = file
        return unfinished

    def _opened(self, name: str) -> StoredFile:
        if name not in self._open:
            self._open[name] = StoredFile(self._folder / name)
        return self._open[name]

    def _check_room(self, size: int) -> None:
        """Raises NoRoom unless all files of this rank fit. Called under the lock."""
        promised = allocated = own = 0
        for name in self._names():
            if rank_progress.rank_of(name) is not None:
                continue  # a page for each rank is nothing beside a state
            try:
                status = (self._folder / name).lstat()
            except FileNotFoundError:
                continue  # another rank has just renamed its file; this sum misses it, and `allocate` finds out
            if _rank_of(name) == self._rank:
                own += status.st_blocks * 512
            elif is_copies_name(name):
                continue  # their process removes them where the node's own files need the room of the limit
            elif stat.S_ISDIR(status.st_mode):  # of `memory_folder`
                held = tmpfs.bytes_in(str(self._folder / name))
                promised += held
                allocated += held
            else:
                promised += status.st_size
                allocated += status.st_blocks * 512
        mount = os.statvfs(self._folder)
        room.check(
            room.Room(
                limit=self._settings.limit,
                promised=promised,
                promised_unwritten=max(0, promised - allocated),
                mount_size=mount.f_blocks * mount.f_frsize,
                mount_free=mount.f_bavail * mount.f_frsize,
                own=own,
                memory=memory_room(),
            ),
            size,
            self._settings.keep,
        )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Holds the lock of the folder: two ranks must not count on the same room."""
        descriptor = os.open(
            self._folder / memory_files.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _PERMISSIONS
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _rank_of(name: str) -> int | None:
    """Returns the rank in the name of a file of a rank, whole or not; None: it is none."""
    file = memory_files.state_file(name)
    if file is not None:
        return file.rank
    found = _SLOT.fullmatch(name)
    if found is None:
        return None
    return int(found[1])
