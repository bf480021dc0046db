"""Folders in the node's memory for a user's own files: `ft.memory_folder`. `latest_folder.py` finds them again.

For programs that write their checkpoint by other means (`torch.save`, DCP, `accelerator.save_state`): the folder of a
step is either complete on all ranks, or it never existed. What is in the files is not known here, and not verified.
"""

from __future__ import annotations

import functools
import operator
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from ft_client.memory import progress
from ft_client.memory.node_folder import (
    claim,
    names_in,
    node_of,
    ranks_of_node,
    read_settings_in_group,
    say,
    why_not,
)
from ft_client.memory.step_folders import free, is_freed, remove, remove_set_aside, too_large, unfinished, why_off
from ft_client.rank.agreement import group
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import MemoryFiles, StateFolder
from rank_monitor.contract.processes import tmpfs

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
    folder, where one more folder as large as the largest before does not fit, and after three folders in a row that
    came to nothing: one line says so. After a fault that a bad state may have caused, the folder of a step that must be
    passed first is removed at the end. Ask `is_on` before a state is written for nothing.

    Collective: all ranks enter and leave it after the same step, once there is a process group.

    Example:

        with ft.memory_folder(step, is_collective=False) as folder:
            torch.save(state, folder / f"{rank}.pt")

    Args:
        step: how many steps the training has done.
        is_collective: whether the ranks wait for each other in the body.
        training: the name of the training, where the job has several, one after the other: each finds its own folders.
            Those of the one before are removed when the first folder of the next one is complete.

    Raises:
        TypeError, ValueError: the step is no whole number, or less than 1.
        RuntimeError: the job has several ranks and no process group yet.
    """

    _is_off_said: ClassVar[bool] = False
    """Whether a line has said why no folder is kept now."""

    def __init__(self, step: int, is_collective: bool = True, training: str = "") -> None:
        self._step = operator.index(step)
        if self._step < 1:
            raise ValueError(f"memory_folder({step}): the step must be 1 or more")
        self._is_collective = is_collective
        self._training = memory_files.training_in_name(training)
        self._settings = read_settings_in_group("ft.memory_folder()")
        self._path = Path()
        self._name = ""
        self._is_temporary = True
        self._is_held_back = False
        """Whether the folder is removed at the end, since the training has not passed the step of a fault yet."""
        self._is_first = False
        """Whether this is the first rank of its node, which renames and removes."""
        self._began = 0.0
        """When the block was entered (monotonic seconds)."""

    @staticmethod
    def is_on(step: int | None = None) -> bool:
        """Returns whether a folder that is written now would be kept, the same on all ranks. Collective.

        Args:
            step: how many steps the training has done. None: whether the training has passed the step of a fault that a
                bad state may have caused, before which no folder is kept, is not asked.

        Raises:
            TypeError: the step is no whole number.
            RuntimeError: the job has several ranks and no process group yet.
        """
        if step is not None:
            step = operator.index(step)
        settings = read_settings_in_group("ft.memory_folder.is_on()")
        if settings is None:
            return False
        exchanged = _exchange(settings)
        _say_off(exchanged, settings)
        return not exchanged.reason_off and not (step is not None and _is_held_back(exchanged, step))

    def __enter__(self) -> Path:
        self._began = time.monotonic()
        exchanged = None
        if self._settings is not None:
            exchanged = _exchange(self._settings)
            _say_off(exchanged, self._settings)
        self._is_temporary = exchanged is None or bool(exchanged.reason_off)
        if exchanged is None or self._settings is None or self._is_temporary:
            self._path = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
            return self._path
        # In memory too, where there is room for it; a whole state may not fit into the temporary folder's disk.
        self._is_held_back = _is_held_back(exchanged, self._step)
        ranks = exchanged.node_ranks
        self._is_first = ranks[0] == group.rank()
        in_name = memory_files.ranks_in_name(ranks)
        self._name = StateFolder(self._step, group.size(), in_name, exchanged.series, self._training).name
        self._path = Path(self._settings.folder) / (self._name + memory_files.UNFINISHED)
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            # The tmpfs is full. The body finds no folder, and fails.
            pass
        return self._path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        goes_on = error is not None and (self._is_collective or not isinstance(error, Exception))
        if self._is_temporary or self._settings is None:
            shutil.rmtree(self._path, ignore_errors=True)
            if self._settings is None or goes_on or error is None:
                return False
            self._say_not_saved(error)
            return True
        if goes_on:
            # No other rank is waited for here. What is in the folder is freed before the next one.
            return False
        if self._is_held_back:
            self._drop(self._settings.folder, error)
            return True
        problem = error
        if problem is None and self._is_first:
            problem = too_large(self._settings, self._path.name)
        if problem is not None:
            self._say_not_saved(problem)
        is_whole = _all(problem is None)
        has_name = is_whole and (not self._is_first or self._give_name())
        # Once a rank goes on, the folder has its name on all nodes. Older ones are removed only then: a death between
        # the renaming of two nodes would leave none that both have.
        is_whole = _all(has_name)
        if self._is_first and is_whole:
            self._remove_useless(self._settings.keep)
        elif self._is_first:
            self._take_back()
        self._note(self._settings.folder, is_whole)
        return True

    def _note(self, folder: str, is_whole: bool) -> None:
        """Notes the save for the launcher. The first rank of the node notes the size of the folder, which is of all its
        ranks."""
        noted = progress.current(folder, group.rank())
        noted.reached(self._step)
        noted.cost(time.monotonic() - self._began)
        if not is_whole:
            noted.failed()
            return
        size = 0
        if self._is_first:
            size = tmpfs.bytes_in(str(self._path.with_name(self._name)))
        noted.saved(size)

    def _drop(self, folder: str, error: BaseException | None) -> None:
        """Removes the folder of a step at which nothing is kept yet, once all ranks have left the block."""
        if error is not None:
            self._say_not_saved(error)
        _all(True)
        if self._is_first:
            remove(self._path.parent, [self._path.name])
        noted = progress.current(folder, group.rank())
        noted.reached(self._step)
        noted.cost(time.monotonic() - self._began)

    def _say_not_saved(self, problem: BaseException) -> None:
        say(f"step {self._step} was not saved in memory: {type(problem).__name__}: {problem}")

    def _give_name(self) -> bool:
        """Gives the folder the name of a whole one. Returns whether that is done."""
        try:
            self._path.rename(self._path.with_name(self._name))
        except OSError as problem:
            self._say_not_saved(problem)
            return False
        return True

    def _take_back(self) -> None:
        """Makes the folder one that came to nothing. It has its name already where that failed on another node only."""
        with suppress(OSError):
            self._path.with_name(self._name).rename(self._path)
        free(self._path)

    def _remove_useless(self, keep: int) -> None:
        """Removes all folders that nobody loads any more, once the new one is whole: those older than the newest
        `keep`, those of other ranks and of other trainings, what came to nothing, and what the training has gone back
        behind: it computes these steps again."""
        folder = self._path.parent
        names = names_in(str(folder))
        own = memory_files.state_folder(self._name)
        whole = memory_files.complete_folders(names)
        useful = [
            found
            for found in whole
            if own is not None
            and (found.world, found.ranks, found.training) == (own.world, own.ranks, own.training)
            and (found == own or found.step < own.step)
        ]
        useless = set(whole) - set(useful[:keep])
        remove(folder, [*(found.name for found in useless), *unfinished(names)])


@dataclass(frozen=True)
class _Exchanged:
    """What the ranks have said to each other before a folder is written; the same on all, but for `node_ranks`.

    Attributes:
        series: of the folder.
        node_ranks: the ranks of this rank's node, ascending.
        reason_off: why no folder is kept; empty: it is.
        of_rank: whose reason that is.
        no_save_until: the step that the training must pass before a folder is kept; 0: none.
    """

    series: str
    node_ranks: list[int]
    reason_off: str
    of_rank: int
    no_save_until: int


def _exchange(settings: MemoryFiles) -> _Exchanged:
    """Asks all ranks whether a folder can be kept, and frees the memory of what came to nothing. Collective.

    No rank is in a block now, so what is unfinished was left by a block that ended otherwise.
    """
    folder = Path(settings.folder)
    refused = why_not(settings) or claim(settings.folder)
    if not refused and not folder.is_dir():
        refused = f"{settings.folder} is gone"
    held: list[str] = []
    is_off = ""
    names = names_in(settings.folder)
    if not refused:
        held = [name for name in unfinished(names) if not is_freed(folder / name)]
        is_off = why_off(settings, group.size(), names)
    node = node_of(settings.folder, group.rank())
    has_more = bool(held) or memory_files.set_aside_from(names) is not None
    no_save_until = memory_files.no_save_until(names)
    offers = group.gather_json([node, os.urandom(4).hex(), refused, is_off, has_more, no_save_until])
    ranks = ranks_of_node([node for node, *_ in offers], group.rank())
    series = offers[0][1]
    no_save_until = max(until for *_, until in offers)
    reasons = [refused for _, _, refused, *_ in offers]
    # Where a process may not use the files, it is not known whose block it is in.
    if not any(reasons):
        reasons = [is_off for _, _, _, is_off, *_ in offers]
        if any(has_more for *_, has_more, _ in offers):
            if ranks[0] == group.rank():
                for name in held:
                    free(folder / name)
                remove_set_aside(folder)
            # No rank writes before the memory is there.
            _all(True)
    for rank, reason in enumerate(reasons):
        if reason:
            return _Exchanged(series, ranks, reason, rank, no_save_until)
    return _Exchanged(series, ranks, "", 0, no_save_until)


def _all(is_good: bool) -> bool:
    """Returns whether all ranks say yes. Collective."""
    return bool(group.min_over_ranks([float(is_good)])[0])


def _say_off(exchanged: _Exchanged, settings: MemoryFiles) -> None:
    """Says on rank 0 why no folder is kept, once until one is kept again, unless `read_settings` has said it."""
    is_said = memory_folder._is_off_said
    memory_folder._is_off_said = bool(exchanged.reason_off)
    if not exchanged.reason_off or is_said or group.rank() != 0:
        return
    if exchanged.of_rank == 0 and not settings.folder:
        return
    say(f"no folders are kept in memory: rank {exchanged.of_rank}: {exchanged.reason_off}")


def _is_held_back(exchanged: _Exchanged, step: int) -> bool:
    """Returns whether the folder of a step is not kept yet, and says so."""
    if step > exchanged.no_save_until:
        return False
    _say_not_yet(exchanged.no_save_until)
    return True


@functools.cache
def _say_not_yet(step: int) -> None:
    """Says on rank 0, once for each step, that no folder is kept before the training has passed the step."""
    if group.rank() == 0:
        say(f"no folders are kept in memory before step {step} is passed, where the job failed")
