"""Folders in the node's memory for a user's own files: `ft.memory_folder` and `ft.latest_memory_folder`.

For programs that write their checkpoint by other means (`torch.save`, DCP, `accelerator.save_state`): the folder of a
step is either complete on all ranks, or it never existed. What is in the files is not known here, and not verified.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from ft_client.memory.node_folder import claim, names_in, node_of, read_plan, say, why_not
from ft_client.rank.agreement import group
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import MemoryFiles, StateFolder

_MAX_NOT_WHOLE = 3
"""Folders in a row that may come to nothing, as for saves of `MemoryCheckpoint`. Each costs a whole write."""

_TEMPORARY = "ft_temporary_"
"""Begins the name of a temporary folder. Launchers remove what has the prefix of a job's folder."""


class memory_folder:
    """A context manager: a folder into which all ranks of this node write the state of a step.

    The folder is complete once all ranks have left the body without an exception. If one has not, the folder is removed
    on all nodes.

    An exception of the body goes on, as from any `with`: where the body has collectives (DCP, accelerate, DeepSpeed),
    the other ranks may wait in them for this one, which must not wait for them elsewhere. `is_collective=False` says
    that it has none. Then an exception is said by one line, and the training goes on, with the state that was complete
    before. (What is no `Exception`, such as KeyboardInterrupt, goes on all the same.)

    Without the launcher the folder is a temporary one, which is removed at the end. So it is where a node has no
    folder, and after three folders in a row that came to nothing: one line says so. Ask `is_on` before a state is
    written for nothing.

    Collective: all ranks enter and leave it after the same step.

    Example:

        with ft.memory_folder(step, is_collective=False) as folder:
            torch.save(state, folder / f"{rank}.pt")

    Args:
        step: how many steps the training has done.
        is_collective: whether the ranks wait for each other in the body.
    """

    _not_whole: ClassVar[int] = 0
    """Folders in a row that came to nothing, as far as this process knows."""

    def __init__(self, step: int, is_collective: bool = True) -> None:
        if step < 1:
            raise ValueError(f"memory_folder({step}): the step must be 1 or more")
        self._step = step
        self._is_collective = is_collective
        self._plan = read_plan()
        self._path = Path()
        self._name = ""
        self._is_temporary = True
        self._is_first = False
        """Whether this is the first rank of its node, which renames and removes."""

    @staticmethod
    def is_on() -> bool:
        """Returns whether a folder that is written now would be kept, the same on all ranks. Collective."""
        plan = read_plan()
        if plan is None:
            return False
        exchanged = _exchange(plan)
        _say_off(exchanged, plan)
        return not exchanged.reason_off

    def __enter__(self) -> Path:
        exchanged = None
        if self._plan is not None:
            exchanged = _exchange(self._plan)
            _say_off(exchanged, self._plan)
        self._is_temporary = exchanged is None or bool(exchanged.reason_off)
        if exchanged is None or self._plan is None or self._is_temporary:
            self._path = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
            return self._path
        ranks = exchanged.node_ranks
        self._is_first = ranks[0] == group.rank()
        in_name = memory_files.ranks_in_name(ranks)
        self._name = StateFolder(self._step, group.size(), in_name, exchanged.series).name
        self._path = Path(self._plan.folder) / (self._name + memory_files.UNFINISHED)
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            # The tmpfs is full. The body finds no folder, and fails.
            pass
        return self._path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        goes_on = error is not None and (self._is_collective or not isinstance(error, Exception))
        if self._is_temporary or self._plan is None:
            shutil.rmtree(self._path, ignore_errors=True)
            if self._plan is None or goes_on or error is None:
                return False
            self._say_not_saved(error)
            return True
        if goes_on:
            # No other rank is waited for here. What is in the folder is removed after the next one.
            memory_folder._not_whole += 1
            return False
        problem = error
        if problem is None and self._is_first:
            problem = _too_large(self._plan)
        if problem is not None:
            self._say_not_saved(problem)
        is_whole = bool(group.min_over_ranks([float(problem is None)])[0])
        if self._is_first:
            self._finish(is_whole, self._plan.keep)
        if is_whole:
            memory_folder._not_whole = 0
        else:
            memory_folder._not_whole += 1
        # Once a rank goes on, the folder has its name on all nodes.
        group.min_over_ranks([1.0])
        return True

    def _say_not_saved(self, problem: BaseException) -> None:
        say(f"step {self._step} was not saved in memory: {type(problem).__name__}: {problem}")

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
    launcher is not plan. Collective.

    A folder counts only if its node has the ranks now that it had then: each rank finds the files that it wrote.

    Args:
        newer_than: the step of the newest checkpoint on disk: an older folder is not returned. The largest value of all
            ranks counts.
    """
    plan = read_plan()
    if plan is None:
        return None
    own = memory_files.complete_folders(names_in(plan.folder))
    node = node_of(plan.folder, group.rank())
    listed = [[found.step, found.world, found.ranks, found.series] for found in own]
    offers = group.gather_json([node, int(newer_than), listed])
    nodes = [offer[0] for offer in offers]
    on_disk = max(offer[1] for offer in offers)

    def fitting(rank: int) -> set[tuple[int, str]]:
        """Returns step and series of each folder of a rank's node that was written by the ranks that it has now."""
        in_name = memory_files.ranks_in_name(_ranks_of(nodes, rank))
        return {
            (step, series) for step, world, ranks, series in offers[rank][2] if (world, ranks) == (len(offers), in_name)
        }

    common = set.intersection(*(fitting(rank) for rank in range(len(offers))))
    in_name = memory_files.ranks_in_name(_ranks_of(nodes, group.rank()))
    for found in own:
        if found.ranks == in_name and found.world == len(offers) and (found.step, found.series) in common:
            if found.step <= on_disk:
                return None
            if group.rank() == 0:
                say(f"the newest folder in memory is of step {found.step} (the checkpoint on disk has step {on_disk})")
            return Path(plan.folder) / found.name
    return None


@dataclass(frozen=True)
class _Exchanged:
    """What the ranks have said to each other before a folder is written; the same on all, but for `node_ranks`.

    Attributes:
        series: of the folder.
        node_ranks: the ranks of this rank's node, ascending.
        reason_off: why no folder is kept; empty: it is.
        of_rank: whose reason that is.
    """

    series: str
    node_ranks: list[int]
    reason_off: str
    of_rank: int


def _exchange(plan: MemoryFiles) -> _Exchanged:
    """Asks all ranks whether a folder can be kept. Collective.

    Each rank says how many folders in a row have come to nothing: after a restart in process some ranks are new
    processes, which do not know.
    """
    refused = why_not(plan) or claim(plan.folder)
    if not refused and not Path(plan.folder).is_dir():
        refused = f"{plan.folder} is gone"
    if not refused and memory_folder._not_whole >= _MAX_NOT_WHOLE:
        refused = f"{memory_folder._not_whole} folders in a row were not whole"
    offers = group.gather_json([node_of(plan.folder, group.rank()), os.urandom(4).hex(), refused])
    nodes = [node for node, _, _ in offers]
    ranks = _ranks_of(nodes, group.rank())
    for rank, (_, _, reason) in enumerate(offers):
        if reason:
            return _Exchanged(offers[0][1], ranks, reason, rank)
    return _Exchanged(offers[0][1], ranks, "", 0)


def _say_off(exchanged: _Exchanged, plan: MemoryFiles) -> None:
    """Says on rank 0 why no folder is kept, once, unless `read_plan` has said it."""
    if not exchanged.reason_off or group.rank() != 0:
        return
    if exchanged.of_rank == 0 and not plan.folder:
        return
    _say_once(f"no folders are kept in memory: rank {exchanged.of_rank}: {exchanged.reason_off}")


@functools.cache
def _say_once(text: str) -> None:
    say(text)


def _ranks_of(nodes: list[str], rank: int) -> list[int]:
    """Returns the ranks that are on the node of a rank, ascending. `nodes`: by rank."""
    return [other for other, node in enumerate(nodes) if node == nodes[rank]]


def _is_unfinished(name: str) -> bool:
    """Whether a name is that of an unfinished folder of a step."""
    whole = name.removesuffix(memory_files.UNFINISHED)
    return whole != name and memory_files.state_folder(whole) is not None


def _too_large(plan: MemoryFiles) -> OSError | None:
    """Returns why a new folder may not stay; None: it may. Its size is not known before it is written."""
    total = sum(_size_of(Path(plan.folder) / name) for name in names_in(plan.folder))
    if total <= plan.limit:
        return None
    return OSError(f"all states in memory would have {total} bytes, {total - plan.limit} more than the limit")


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
