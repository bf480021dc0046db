"""Folders in the node's memory for a user's own files: `ft.memory_folder` and `ft.latest_memory_folder`.

For programs that write their checkpoint by other means (`torch.save`, DCP, `accelerator.save_state`): the folder of a
step is either complete on all ranks, or it never existed. What is in the files is not known here, and not verified.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from ft_client.memory.node_folder import names_in, node_of, say, told
from ft_client.rank.agreement import group
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import MemoryFiles, StateFolder


class memory_folder:
    """A context manager: a folder into which all ranks of this node write the state of a step.

    The folder is complete once all ranks have left the body without an exception. If one has not, the folder is removed
    on all nodes. An exception of the body does not go on: one line on stderr says it, and the training continues, with
    the state that was complete before. (What is no `Exception`, such as KeyboardInterrupt, does go on.)

    Without the launcher the folder is a temporary one, which is removed at the end.

    Collective: all ranks enter and leave it after the same step.

    Example:

        with ft.memory_folder(step) as folder:
            torch.save(state, folder / f"{rank}.pt")

    Args:
        step: how many steps the training has done.
    """

    def __init__(self, step: int) -> None:
        if step < 1:
            raise ValueError(f"memory_folder({step}): the step must be 1 or more")
        self._step = step
        self._told = told()
        self._path = Path()
        self._name = ""
        self._is_first = False
        """Whether this is the first rank of its node, which renames and removes."""

    def __enter__(self) -> Path:
        if self._told is None:
            self._path = Path(tempfile.mkdtemp(prefix=memory_files.FOLDER_PREFIX))
            return self._path
        folder = self._told.folder
        offers = group.gather_json([node_of(folder, group.rank()), os.urandom(4).hex()])
        nodes = [node for node, _ in offers]
        self._is_first = nodes.index(nodes[group.rank()]) == group.rank()
        self._name = StateFolder(self._step, group.size(), offers[0][1]).name
        if not folder:
            self._path = Path(tempfile.mkdtemp(prefix=memory_files.FOLDER_PREFIX))
            return self._path
        self._path = Path(folder) / (self._name + memory_files.UNFINISHED)
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            # The body finds no folder, and fails: `__exit__` says so and tells the other ranks.
            pass
        return self._path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if self._told is None:
            shutil.rmtree(self._path, ignore_errors=True)
            return False
        if error is not None and not isinstance(error, Exception):
            return False
        problem = error
        if problem is None and self._is_first:
            problem = _too_large(self._told)
        if problem is not None:
            say(f"step {self._step} was not saved in memory: {type(problem).__name__}: {problem}")
        has_folder = bool(self._told.folder)
        is_whole = group.min_over_ranks([float(problem is None and has_folder)])[0]
        if not has_folder:
            shutil.rmtree(self._path, ignore_errors=True)
        elif self._is_first:
            self._finish(bool(is_whole), self._told.keep)
        # Once a rank goes on, the folder has its name on all nodes.
        group.min_over_ranks([1.0])
        return True

    def _finish(self, is_whole: bool, keep: int) -> None:
        """Names or removes the folder, and removes what is older than the newest `keep` folders."""
        folder = self._path.parent
        try:
            if is_whole:
                self._path.rename(folder / self._name)
        except OSError as problem:
            say(f"step {self._step} was not saved in memory: {problem}")
        names = names_in(str(folder))
        whole = [found.name for found in memory_files.complete_folders(names)]
        unfinished = [name for name in names if _is_unfinished(name)]
        _remove(folder, [*whole[keep:], *unfinished])


def latest_memory_folder(newer_than: int = 0) -> Path | None:
    """Returns the newest folder that is complete on all nodes, the same step on all ranks; None: there is none, or the
    launcher is not there. Collective.

    Args:
        newer_than: the step of the newest checkpoint on disk: an older folder is not returned. The largest value of all
            ranks counts.
    """
    there = told()
    if there is None:
        return None
    own = memory_files.complete_folders(names_in(there.folder))
    offers = group.gather_json([newer_than, [[found.step, found.world, found.series] for found in own]])
    on_disk = max(offer[0] for offer in offers)
    common = {tuple(found) for found in offers[0][1]}
    for _, offered in offers:
        common &= {tuple(found) for found in offered}
    for found in own:
        is_common = (found.step, found.world, found.series) in common
        if is_common and found.world == group.size() and found.step > on_disk:
            if group.rank() == 0:
                say(f"the newest folder in memory is of step {found.step} (the checkpoint on disk has step {on_disk})")
            return Path(there.folder) / found.name
    return None


def _is_unfinished(name: str) -> bool:
    """Whether a name is that of an unfinished folder of a step."""
    whole = name.removesuffix(memory_files.UNFINISHED)
    return whole != name and memory_files.state_folder(whole) is not None


def _too_large(there: MemoryFiles) -> OSError | None:
    """Returns why a new folder may not stay; None: it may. Its size is not known before it is written."""
    total = sum(_size_of(Path(there.folder) / name) for name in names_in(there.folder))
    if total <= there.limit:
        return None
    return OSError(f"all states in memory would have {total} bytes, {total - there.limit} more than the limit")


def _size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder; 0 where it is gone meanwhile."""
    if path.is_dir():
        return sum(_size_of(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
