"""The program that writes the newest states in memory to shared storage, and brings them back into memory.

The launcher starts it as a process of its own (`ft_launcher/node/memory_files/flush.py`): storage may stop answering,
and a process that waits for it in the kernel cannot be ended. The launcher then leaves this process behind. Standard
library only. Argument: an `FlushOrder`, as JSON. Output: the bytes of a state done so far, a line each time, which
shows that the storage answers; a `FlushResult`, as JSON, when the newest state is done, and once more at the end.

**On the storage** a job has a folder (`home`) of mode 0700, named as its folder in memory. In it each node has a folder
for each of the last steps that it wrote, named as a folder of `ft.memory_folder`: so several nodes may share the
storage. It gets its name last, when all its files are on the storage: what was cut off is never read. The record, which
is its first file, says whose the state is; a state of another user, or of another command under the same `--rdzv-id`,
is refused. A node removes only states of its own ranks, but after a success.

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
from dataclasses import dataclass, replace
from pathlib import Path

from rank_monitor.contract import memory_files
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.flush_order import BRING_BACK, REMOVE, WRITE, FlushOrder, FlushResult
from rank_monitor.contract.memory_files import UNFINISHED, Generation, StateFile, StateFolder
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.processes import tmpfs
from rank_monitor.contract.wire.foreign import parse_json, read_file
from rank_monitor.contract.wire.json_record import from_json, read_record, write_record

_CHUNK = 8 << 20
"""Bytes that are copied at once. After each the storage has them: a large write at the end could take longer than the
launcher waits for a sign of life."""
_KEPT = 2
"""How many states of its ranks a node has on the storage. Where a job ends while its ranks save, the newest one of a
node is mostly the second one of another."""
_TRIES = 10
"""How often the job's folder is made again that another process removes."""
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
    except (_Refused, OSError) as problem:
        result = FlushResult(reason=_words(problem, order))
    print(write_record(result), flush=True)


def _write(order: FlushOrder) -> FlushResult:
    """Writes the generations that are complete in memory and not set aside, the newest first: the newest one of this
    node may not be complete on the others. Says each one when it is written; returns the newest that was."""
    home = Path(order.storage) / order.name
    if order.below:
        _remove_from(home, order)
    found = memory_files.complete_generations(_names(Path(order.memory)))
    written: list[StateFolder] = []
    newest, reason = FlushResult(), ""
    for generation in found[:_KEPT]:
        folder = _folder_of(generation)
        if written and not _has_ranks_of(folder.name, written[0]):
            continue
        try:
            size = _write_one(generation, home, order)
        except (_Refused, OSError) as problem:
            reason = reason or _words(problem, order)
            continue
        written.append(folder)
        if newest.step is None:
            newest = FlushResult(generation.step, size)
            print(write_record(newest), flush=True)
        _keep_newest(home, written, order)
    if newest.step is None:
        return FlushResult(reason=reason)
    return newest


def _write_one(generation: Generation, home: Path, order: FlushOrder) -> int:
    """Writes one generation; returns its bytes. Raises _Refused or OSError: it is not written."""
    _home(order)
    sources = [Path(order.memory) / name for name in _files_of(generation)]
    size = sum(source.stat().st_size for source in sources)
    target = home / _folder_of(generation).name
    partial = target.with_name(target.name + UNFINISHED)
    _make(home, partial, order)
    if target.is_dir():  # a start that did not get beyond this step
        _remove_folder(partial)
        return size
    try:
        free = os.statvfs(home)
        if size > free.f_bavail * free.f_frsize:
            has = size_in_words(free.f_bavail * free.f_frsize)
            raise _Refused(f"step {generation.step} has {size_in_words(size)}, and {order.storage} has {has} free")
        record = FlushRecord(order.uid, order.name, order.command, order.host, time.time())
        _write_whole(partial / _RECORD_NAME, write_record(record).encode())
        _copy(sources, partial)
        _sync(partial)
        partial.rename(target)
        _sync(home)
    except (_Refused, OSError):
        _remove_folder(partial)
        raise
    return size


def _make(home: Path, partial: Path, order: FlushOrder) -> None:
    """Makes the folder for a state that is not whole, empty, and the job's folder around it. Another process may remove
    the job's folder between the two, where it was empty."""
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            home.mkdir(0o700)
        with suppress(FileNotFoundError):
            _must_be_own(home, order)
            _remove_folder(partial)
            partial.mkdir(0o700)
            return
    raise _Refused(f"{home} is removed by another process again and again")


def _keep_newest(home: Path, written: Sequence[StateFolder], order: FlushOrder) -> None:
    """Removes older states of the same ranks, so that `_KEPT` are there, and what was cut off. What was there before
    and is of a later step goes, too: the training has not gone on from it."""
    names = [
        name
        for name in _names(home)
        if _has_ranks_of(name.removesuffix(UNFINISHED), written[0]) and _is_ours(home / name, order)
    ]
    others = [folder for folder in memory_files.complete_folders(names) if folder not in written]
    older = [folder for folder in others if folder.step < written[0].step]
    kept = {folder.name for folder in [*written, *older[: _KEPT - len(written)]]}
    for name in names:
        if name not in kept:
            with suppress(OSError):
                _remove_folder(home / name)


def _has_ranks_of(name: str, other: StateFolder) -> bool:
    """Returns whether a name is that of a state of the same ranks."""
    found = memory_files.state_folder(name)
    return found is not None and (found.world, found.ranks) == (other.world, other.ranks)


def _bring_back(order: FlushOrder) -> FlushResult:
    """Copies the states of this node's ranks into memory that are not there, the newest first: which of them all nodes
    have is found out by the ranks. Says the first one when it is there, and returns it."""
    home = _home(order)
    if not home.exists():
        return FlushResult()
    _must_be_own(home, order)
    names = _names(Path(order.memory))
    below = memory_files.set_aside_from(names)
    in_memory = {(each.step, each.series) for each in memory_files.complete_generations(names)}
    found = [
        each
        for each in memory_files.complete_folders(_names(home))
        if _is_of_ranks(each, order) and (below is None or each.step < below)
    ]
    own = [each for each in found if _is_ours(home / each.name, order)]
    if found and not own:
        _record_of(home / found[0].name, order)
    newest, reason, there = FlushResult(), "", ""
    for each in own:
        if (each.step, each.series) in in_memory:
            there = there or f"step {each.step} there is in memory already"
            continue
        try:
            back = _bring_one(home / each.name, each, order)
        except (_Refused, OSError) as problem:
            reason = reason or _words(problem, order)
            continue
        if newest.step is None:
            newest = replace(back, reason=reason)
            print(write_record(newest), flush=True)
    if newest.step is None:
        return FlushResult(reason=reason or there)
    return newest


def _bring_one(folder: Path, found: StateFolder, order: FlushOrder) -> FlushResult:
    """Copies one state into memory. Raises _Refused or OSError: it is not there, not even in part."""
    record = _record_of(folder, order)
    generation = Generation(found.step, found.world, found.series, tuple(order.ranks))
    sources = [folder / name for name in _files_of(generation)]
    size = sum(_size_of(source) for source in sources)
    memory = Path(order.memory)
    mount = os.statvfs(memory)
    room = max(0, min(order.limit - tmpfs.bytes_in(order.memory), int(mount.f_bavail * mount.f_frsize * _FREE)))
    if size > room:
        raise _Refused(
            f"step {found.step} there has {size_in_words(size)}, and memory has room for {size_in_words(room)}"
        )
    try:
        _copy(sources, memory, UNFINISHED)
        _write_whole(memory / memory_files.flushed_name(found.step, found.series), b"")
        for source in sources:
            (memory / (source.name + UNFINISHED)).rename(memory / source.name)
    except OSError:
        for source in sources:
            (memory / (source.name + UNFINISHED)).unlink(missing_ok=True)
        raise
    return FlushResult(found.step, size, age_s=max(0.0, time.time() - record.written_at), host=record.host)


def _remove(order: FlushOrder) -> FlushResult:
    """Removes what the job has on the storage, of all nodes; with `FlushOrder.below` only the states of that step and
    later ones, and only of this node's ranks."""
    home = Path(order.storage) / order.name
    _remove_from(home, order)
    if not order.below:
        with suppress(OSError):  # something of others is in it, or it was never made
            home.rmdir()
    return FlushResult()


def _remove_from(home: Path, order: FlushOrder) -> None:
    """Removes the states of this job's command that `_remove` names. Other nodes may write theirs at this moment."""
    if not home.exists():
        return
    _must_be_own(home, order)
    for name in _names(home):
        found = memory_files.state_folder(name.removesuffix(UNFINISHED))
        if found is None or found.step < order.below or (order.below and not _is_of_ranks(found, order)):
            continue
        if _is_ours(home / name, order):
            _remove_folder(home / name)


def _is_of_ranks(folder: StateFolder, order: FlushOrder) -> bool:
    return (folder.world, folder.ranks) == (order.world, memory_files.ranks_in_name(order.ranks))


def _folder_of(generation: Generation) -> StateFolder:
    ranks = memory_files.ranks_in_name(generation.ranks)
    return StateFolder(generation.step, generation.world, ranks, generation.series)


def _words(problem: Exception, order: FlushOrder) -> str:
    """Returns why something is not done, in words."""
    if isinstance(problem, OSError):
        return f"{problem.filename or order.storage}: {problem.strerror or problem}"
    return str(problem)


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
    """Removes a state, whole or not. First it gets the name of one that is not whole, so that what is left of it is
    never read; its record goes last, so that a later removal knows whose it is. Another process may remove the same at
    this moment.

    Raises:
        OSError: it cannot be renamed.
    """
    if not folder.name.endswith(UNFINISHED):
        rest = folder.with_name(folder.name + UNFINISHED)
        _remove_folder(rest)
        try:
            folder.rename(rest)
        except FileNotFoundError:
            return
        folder = rest
    with suppress(OSError):
        for name in _names(folder):
            if name != _RECORD_NAME:
                (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
