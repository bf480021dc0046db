"""The folders of steps on this node: whether one more fits, and what becomes of those that came to nothing.

**A folder that came to nothing** (a rank was killed in its block, or has failed) is an unfinished one. Its memory is
freed before the next block. The folder itself stays until a later one is whole, and notes how many bytes it had: so the
next process of a rank knows how often in a row that has failed, and with which size.

No other rank is asked here (`memory_folders.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ft_client.memory.node_folder import names_in
from ft_client.memory.room import Room
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.processes import tmpfs
from rank_monitor.contract.processes.cgroup import memory_room

_MAX_NOT_WHOLE = 3
"""Folders in a row that may come to nothing, as for saves of `MemoryCheckpoint`. Each costs a whole write, or a restart
of the ranks."""

_SIZE_NAME = ".ft_bytes"
"""The only file in a folder that is freed. It has no content, and the size of all files that were there."""


def why_off(settings: MemoryFiles, world: int, names: Sequence[str]) -> str:
    """Returns why one more folder would come to nothing on this node; empty: it would not.

    How large the folder will be is not known: it counts as large as the largest one so far, whole or not. The memory of
    those that came to nothing counts as free.

    Args:
        settings: what the launcher says.
        world: how many ranks the job has: with another number of them a folder has another size.
        names: the listing of the node's folder.
    """
    nothing = unfinished(names)
    if len(nothing) >= _MAX_NOT_WHOLE:
        return f"{len(nothing)} folders in a row were not whole"
    folder = Path(settings.folder)
    largest = max((size_of(folder / name) for name in names if _world_of(name) == world), default=0)
    promised = sum(size_of(folder / name) for name in names if name not in nothing)
    freed = sum(tmpfs.bytes_in(str(folder / name)) for name in nothing)
    try:
        mount = os.statvfs(folder)
    except OSError as problem:
        return str(problem)
    room = Room(
        limit=settings.limit,
        promised=promised,
        promised_unwritten=max(0, promised + freed - tmpfs.bytes_in(settings.folder)),
        mount_size=mount.f_blocks * mount.f_frsize,
        mount_free=mount.f_bavail * mount.f_frsize,
        own=freed,
        memory=memory_room(),
    )
    if room.left() >= max(1, largest):
        return ""
    text = f"{size_in_words(room.left())} are left for one more folder, and the largest so far has"
    text += f" {size_in_words(largest)}"
    if settings.keep > 1:
        text += "; --ft-memory-keep 1 needs less"
    return text


def _world_of(name: str) -> int | None:
    """Returns how many ranks the job had that wrote the folder of a step, whole or not; None: the name is not one."""
    found = memory_files.state_folder(name.removesuffix(memory_files.UNFINISHED))
    if found is None:
        return None
    return found.world


def unfinished(names: Iterable[str]) -> list[str]:
    """Returns those names that are of unfinished folders of steps."""
    return [name for name in names if name.endswith(memory_files.UNFINISHED) and _world_of(name) is not None]


def too_large(settings: MemoryFiles, name: str) -> OSError | None:
    """Returns why a new folder may not stay; None: it may. Its size is not known before it is written.

    `name`: of the new folder, as it is now.
    """
    names = set(names_in(settings.folder))
    counted = names - set(unfinished(names)) | {name}
    total = sum(size_of(Path(settings.folder) / name) for name in counted)
    if total <= settings.limit:
        return None
    return OSError(f"all states in memory would have {total} bytes, {total - settings.limit} more than the limit")


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder; 0 where it is gone meanwhile."""
    if path.is_dir():
        return sum(size_of(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def remove_set_aside(folder: Path, keeps_files: bool = False) -> None:
    """Removes the folders and files of steps that are set aside, and then the marks that set them aside.

    Called by one rank of the node, before anything new is saved: a later step may be good again, and must not be left
    out for its number.

    Args:
        folder: of the node.
        keeps_files: the files of `MemoryCheckpoint` stay: its ranks make them unfinished, and write them again. Else
            nobody has looked for these files since they were set aside, and without the mark they would be loaded.
    """
    names = names_in(str(folder))
    below = memory_files.set_aside_from(names)
    if below is None:
        return
    folders = {name: memory_files.state_folder(name) for name in names}
    remove(folder, [name for name, found in folders.items() if found is not None and found.step >= below])
    files = {name: memory_files.state_file(name) for name in names if not keeps_files}
    for name, file in files.items():
        if file is not None and file.step >= below:
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError:
                return  # its mark must stay
    for name in names:
        if memory_files.set_aside_from([name]) is not None:
            with suppress(OSError):
                (folder / name).unlink()


def is_freed(path: Path) -> bool:
    """Whether `free` has done its work in a folder."""
    return names_in(str(path)) == [_SIZE_NAME]


def free(path: Path) -> None:
    """Frees the memory of a folder that came to nothing. Notes its size in it."""
    size = size_of(path)
    remove(path.parent, [path.name])
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        with (path / _SIZE_NAME).open("wb") as noted:
            noted.truncate(size)


def remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
