"""The program that writes the newest state in memory to shared storage, and brings it back into memory.

The launcher starts it as a process of its own (`ft_launcher/node/memory_files/flush.py`): storage may stop answering,
and a process that waits for it in the kernel cannot be ended. The launcher then leaves this process behind. Standard
library only. Argument: an `FlushOrder`, as JSON. Output: the bytes done so far, a line each time, which shows that the
storage answers; then a `FlushResult`, as JSON.

**On the storage** a job has a folder (`home`) of mode 0700, named as its folder in memory. In it each node has a folder
for the step that it wrote, named as a folder of `ft.memory_folder`: so several nodes may share the storage. It gets its
name last, when all its files and the record are on the storage: what was cut off is never read. The record says whose
the state is; a state of another user, or of another command under the same `--rdzv-id`, is refused.

**Back in memory** the files get their names when all of them are there, and the ranks find them in `load()` as they
find any generation, and verify them. `flushed_name` marks where they come from.

Threads: none.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract import memory_files
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.flush_order import BRING_BACK, REMOVE, WRITE, FlushOrder, FlushResult
from rank_monitor.contract.memory_files import UNFINISHED, Generation, StateFile, StateFolder
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.wire.foreign import parse_json, read_file
from rank_monitor.contract.wire.json_record import from_json, read_record, write_record

_CHUNK = 8 << 20
"""Bytes that are copied at once. After each the storage has them: a large write at the end could take longer than the
launcher waits for a sign of life."""
_RECORD_NAME = "record"
_MAX_RECORD = 4096
_FREE = 0.95
"""The share of the free memory of the tmpfs that is filled at most, as for a rank's saves."""


@dataclass(frozen=True)
class FlushRecord:
    """Whose a written state is. `written_at`: seconds since 1970, for people only."""

    uid: int
    name: str
    command: str
    host: str
    written_at: float


class _Refused(Exception):
    """Nothing is written or read, for a reason in words."""


def main() -> None:
    """The program."""
    order = read_record(FlushOrder, sys.argv[-1])
    try:
        result = {WRITE: _write, BRING_BACK: _bring_back, REMOVE: _remove}[order.work](order)
    except _Refused as refused:
        result = FlushResult(reason=str(refused))
    except OSError as error:
        result = FlushResult(reason=f"{error.filename or order.storage}: {error.strerror or error}")
    print(write_record(result), flush=True)


def _write(order: FlushOrder) -> FlushResult:
    """Writes the newest generation that is complete in memory and not set aside."""
    found = memory_files.complete_generations(os.listdir(order.memory))  # noqa: PTH208 - names, not paths
    home = Path(order.storage) / order.name
    if order.below:
        _remove_from(home, order)
    if not found:
        return FlushResult()
    newest = found[0]
    with suppress(FileExistsError):
        _home(order).mkdir(0o700)
    _must_be_own(home, order)
    folder = StateFolder(newest.step, newest.world, memory_files.ranks_in_name(newest.ranks), newest.series)
    sources = [Path(order.memory) / name for name in _files_of(newest)]
    size = sum(source.stat().st_size for source in sources)
    target, partial = home / folder.name, home / (folder.name + UNFINISHED)
    shutil.rmtree(partial, ignore_errors=True)
    if target.is_dir():  # a start that did not get beyond this step
        return FlushResult(newest.step, size)
    free = os.statvfs(home)
    if size > free.f_bavail * free.f_frsize:
        has = size_in_words(free.f_bavail * free.f_frsize)
        raise _Refused(f"step {newest.step} has {size_in_words(size)}, and {order.storage} has {has} free")
    try:
        partial.mkdir(0o700)
        _copy(sources, partial)
        record = FlushRecord(order.uid, order.name, order.command, order.host, time.time())
        _write_whole(partial / _RECORD_NAME, write_record(record).encode())
        _sync(partial)
        partial.rename(target)
        _sync(home)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for other in memory_files.complete_folders(_names(home)):
        if other != folder and (other.world, other.ranks) == (folder.world, folder.ranks):
            _remove_folder(home / other.name)
    return FlushResult(newest.step, size)


def _bring_back(order: FlushOrder) -> FlushResult:
    """Copies the newest state of this node's ranks into memory, if memory has none that is as new."""
    home = _home(order)
    if not home.exists():
        return FlushResult()
    _must_be_own(home, order)
    in_name = memory_files.ranks_in_name(order.ranks)
    found = [
        each
        for each in memory_files.complete_folders(_names(home))
        if (each.world, each.ranks) == (order.world, in_name)
    ]
    if not found:
        return FlushResult()
    newest = found[0]
    folder = home / newest.name
    record = _record_of(folder, order)
    names = os.listdir(order.memory)  # noqa: PTH208 - names, not paths
    in_memory = memory_files.complete_generations(names)
    if in_memory and in_memory[0].step >= newest.step:
        return FlushResult(reason=f"step {newest.step} there is not newer than step {in_memory[0].step} in memory")
    generation = Generation(newest.step, newest.world, newest.series, tuple(order.ranks))
    sources = [folder / name for name in _files_of(generation)]
    size = sum(_size_of(source) for source in sources)
    mount = os.statvfs(order.memory)
    room = min(order.limit, int(mount.f_bavail * mount.f_frsize * _FREE))
    if size > room:
        raise _Refused(
            f"step {newest.step} there has {size_in_words(size)}, and memory has room for {size_in_words(room)}"
        )
    memory = Path(order.memory)
    try:
        _copy(sources, memory, UNFINISHED)
        _write_whole(memory / memory_files.flushed_name(newest.step, newest.series), b"")
        for source in sources:
            (memory / (source.name + UNFINISHED)).rename(memory / source.name)
    except OSError:
        for source in sources:
            (memory / (source.name + UNFINISHED)).unlink(missing_ok=True)
        raise
    return FlushResult(newest.step, size, age_s=max(0.0, time.time() - record.written_at), host=record.host)


def _remove(order: FlushOrder) -> FlushResult:
    """Removes what the job has on the storage; with `FlushOrder.below` only the states of that step and later ones."""
    home = Path(order.storage) / order.name
    _remove_from(home, order)
    return FlushResult()


def _remove_from(home: Path, order: FlushOrder) -> None:
    """Removes the states of this job's command from the step `below` on, and the folder where nothing is left."""
    if not home.exists():
        return
    _must_be_own(home, order)
    for name in _names(home):
        found = memory_files.state_folder(name.removesuffix(UNFINISHED))
        if found is None or found.step < order.below:
            continue
        if name.endswith(UNFINISHED) or _is_ours(home / name, order):
            _remove_folder(home / name)
    with suppress(OSError):  # something of others is in it
        home.rmdir()


def _home(order: FlushOrder) -> Path:
    """Returns the job's folder on the storage. Raises _Refused where the storage is not there."""
    if not Path(order.storage).is_dir():
        raise _Refused(f"{order.storage} is no folder")
    return Path(order.storage) / order.name


def _files_of(generation: Generation) -> list[str]:
    """Returns the names of the files of a generation."""
    count = len(generation.ranks)
    return [
        StateFile(generation.step, rank, generation.world, count, generation.series).name for rank in generation.ranks
    ]


def _must_be_own(home: Path, order: FlushOrder) -> None:
    """Raises _Refused unless a folder on the storage is this user's alone."""
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _Refused(f"{home} is no folder")
    if found.st_uid != order.uid:
        raise _Refused(f"{home} is a folder of another user (uid {found.st_uid}, and this is {order.uid})")
    if found.st_mode & 0o077:
        raise _Refused(f"{home} may be entered by other users (mode {stat.S_IMODE(found.st_mode):04o})")


def _record_of(folder: Path, order: FlushOrder) -> FlushRecord:
    """Returns the record of a written state. Raises _Refused where the state is not of this job's command."""
    try:
        record = from_json(
            FlushRecord, parse_json(read_file(folder / _RECORD_NAME, most=_MAX_RECORD)), ignore_unknown=True
        )
    except (ProtocolError, ValueError, OSError) as problem:
        raise _Refused(f"{folder} has no record that can be read: {problem}") from None
    if (record.uid, record.name, record.command) != (order.uid, order.name, order.command):
        raise _Refused(f"{folder} was written by another command (uid {record.uid}, on {record.host})")
    return record


def _is_ours(folder: Path, order: FlushOrder) -> bool:
    """Returns whether a written state is of this job's command."""
    try:
        _record_of(folder, order)
    except _Refused:
        return False
    return True


def _names(folder: Path) -> list[str]:
    return os.listdir(folder)  # noqa: PTH208 - names, not paths


def _size_of(path: Path) -> int:
    """Returns the bytes of a regular file. Raises OSError."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found.st_size


def _copy(sources: Sequence[Path], folder: Path, more: str = "") -> None:
    """Copies files into a folder, and says how far it is. The new files have `more` at the end of their names, and are
    on the storage when this returns. Raises OSError."""
    done = 0
    for source in sources:
        target = os.open(folder / (source.name + more), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        origin = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            while copied := _copy_chunk(origin, target):
                done += copied
                os.fdatasync(target)
                print(done, flush=True)
        finally:
            os.close(origin)
            os.close(target)


def _copy_chunk(origin: int, target: int) -> int:
    """Copies the next bytes of a file; returns how many. 0: the file has ended."""
    content = os.read(origin, _CHUNK)
    written = 0
    while written < len(content):
        written += os.write(target, memoryview(content)[written:])
    return written


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a small file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Has the storage know the names in a folder. Some file systems, as FUSE's, cannot do this, and need not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_folder(folder: Path) -> None:
    """Removes a written state: its record first, so that what is left of it is never read. Another process may remove
    the same at this moment.

    Raises:
        OSError: the record cannot be removed.
    """
    (folder / _RECORD_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
