"""The user's object that keeps the training's state in memory: `ft.MemoryCheckpoint`."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ft_client.memory import agreed_load, checksum, kept_state
from ft_client.memory.agreed_load import FoundState
from ft_client.memory.agreed_steps import AgreedSteps
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.node_folder import say, told
from ft_client.memory.rank_files import RankFiles
from ft_client.memory.room import NoRoom
from ft_client.memory.save_steps import SaveSteps
from ft_client.memory.state_reader import identity
from ft_client.memory.state_writer import CopiedState, StateWriter
from ft_client.memory.tensor_parts import CannotBeKept
from ft_client.rank.agreement import group
from rank_monitor.contract.memory_files import Generation, MemoryFiles, StateFile
from rank_monitor.contract.memory_room import size_in_words

MAX_FAILURES = 3
"""Saves in a row that may fail. What fails so often will go on to, and each try costs time."""


class MemoryCheckpoint:
    """Keeps the state of a training in the node's memory, where it outlives the ranks.

    Without the launcher every call does nothing, and `load()` returns 0. A save that fails never ends the training: one
    line on stderr says why. After three in a row, or when another try cannot help, no more saves are made.

    Example:

        keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(keep.load(newer_than=step_on_disk), STEPS):
            train_step()
            keep.step(step + 1)

    Each rank's random numbers (Python, numpy, torch, the present CUDA device) are kept too. `load` and `step` are
    collective: all ranks of the process group call them after the same steps, `load` after `init_process_group`.

    Args:
        safe_types: types that may be in the objects' states beside those that torch's weights-only reader admits.
        objects: name -> what has `state_dict` and `load_state_dict`: modules (also in DDP, and after `fully_shard`),
            optimizers, schedulers, loaders.

    Raises:
        TypeError: an object lacks one of these methods.

    Attributes:
        failures: how many saves have failed on this rank.
    """

    _active: ClassVar[MemoryCheckpoint | None] = None
    """The object of this process that was loaded last: it alone uses the rank's files."""

    def __init__(self, *, safe_types: Sequence[type] = (), **objects: Any) -> None:
        self.failures = 0
        self._objects: Mapping[str, Any] = objects
        self._safe_types = safe_types
        self._files: RankFiles | None = None
        self._writer: StateWriter | None = None
        """None: this rank cannot save."""
        self._is_loaded = False
        """Whether `step` has something to do; the same on all ranks."""
        self._failed_in_a_row = 0
        self._has_failed = False
        """Whether the last save has failed on this rank."""
        self._last_step = 0
        self._last_saved = 0
        self._has_saved = False
        self._told: MemoryFiles | None = None
        self._agreed: AgreedSteps | None = None
        self._steps = SaveSteps(1, 0)
        self._without_tensors: frozenset[str] = frozenset()
        self._refused = ""
        """Why the objects can never be kept: the same on all ranks, whose objects are of the same kinds."""
        if not objects:
            raise TypeError("MemoryCheckpoint() needs what it shall keep, such as model=..., optimizer=...")
        try:
            for name, kept in objects.items():
                kept_state.check_object(name, kept)
        except CannotBeKept as problem:
            self._refused = str(problem)
        self._reason_off: str | None = None
        """Why this rank saves nothing any more."""

    def load(self, newer_than: int = 0) -> int:
        """Gives the newest state that all ranks have back to the objects. Returns its step; 0: there is none, and no
        object was changed. Collective; called once before the training's loop, again in each in-process restart.

        Args:
            newer_than: the step of the newest checkpoint on disk: an older state in memory is not used. The largest
                value of all ranks counts.

        Raises:
            RuntimeError: the job has several ranks and no process group yet.
        """
        self._is_loaded = False
        self._told = told()
        if self._told is None:
            return 0
        if self._refused:
            say(f"no state is kept in memory: {self._refused}")
            return 0
        if group.size() == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError("MemoryCheckpoint.load() must be called after torch.distributed.init_process_group")
        self._take_over()
        folder = self._told.folder
        agreed = self._agreed = agreed_load.exchange(folder, newer_than)
        replicated = kept_state.replicated(self._objects, group.size())
        found = agreed_load.find(folder, agreed, self._objects, replicated, self._safe_types, say)
        if found is not None:
            kept_state.give_back(self._objects, found.state)
        self._start_saving(found, replicated)
        self._tell(found, agreed)
        if found is None:
            return 0
        return found.generation.step

    def step(self, step: int) -> None:
        """Saves the state when that is due. Blocks while the state is copied. Collective; called after each step, once
        the optimizer has changed the parameters.

        `step`: how many steps the training has done, which becomes the step that `load` returns.
        """
        if not self._is_loaded:
            return
        if step < self._last_step:
            say(f"step {step} follows step {self._last_step}: it is not saved in memory")
        self._last_step = step
        began = time.monotonic()
        if not self._steps.is_due(step, began):
            return
        if self._may_all_save(step):
            self._save(step)
        self._steps.saved(step, began, time.monotonic())

    def _take_over(self) -> None:
        """Makes this object the one that uses the rank's files."""
        BACKGROUND.wait()
        BACKGROUND.pop_problem()
        active = MemoryCheckpoint._active
        MemoryCheckpoint._active = self
        if active is not None:
            active._stop()

    def _start_saving(self, found: FoundState | None, replicated: frozenset[str]) -> None:
        """Makes all ready for saves."""
        assert self._told is not None and self._agreed is not None
        self._last_step = self._agreed.newer_than
        kept = []
        if found is not None:
            self._last_step = found.generation.step
            kept = [generation for generation in self._agreed.candidates if generation.step <= self._last_step]
        self._reason_off = None
        self._failed_in_a_row = 0
        self._has_failed = False
        self._steps = SaveSteps(self._told.interval, self._last_step)
        self._without_tensors = frozenset()
        if group.rank() != self._agreed.node_ranks[0]:
            self._without_tensors = replicated
        try:
            self._open_files(kept)
        except OSError as problem:
            self._reason_off = str(problem)
            say(f"no state is kept in memory: {problem}")
        self._is_loaded = True

    def _open_files(self, kept: Sequence[Generation]) -> None:
        """Makes this rank's files ready. Raises OSError: they cannot be used."""
        assert self._told is not None and self._agreed is not None
        if not self._told.folder:
            self._reason_off = self._told.refused
            return
        self._files = RankFiles(self._told, group.rank())
        self._files.keep_only(kept)
        if group.rank() == self._agreed.node_ranks[0]:
            self._files.remove_others(self._agreed.node_ranks)
        self._writer = StateWriter(self._files, self._safe_types)

    def _tell(self, found: FoundState | None, agreed: AgreedSteps) -> None:
        """Says on rank 0 where the training goes on."""
        if group.rank() != 0:
            return
        on_disk = ""
        if agreed.newer_than:
            on_disk = f" (the checkpoint on disk has step {agreed.newer_than})"
        if found is not None:
            say(f"the training goes on from step {found.generation.step} in memory{on_disk}")
        elif agreed.older:
            say(f"step {agreed.older[0]} in memory is not newer than the checkpoint on disk{on_disk}")
        elif agreed.left_out:
            other = agreed.left_out[0]
            where = f"it is of {other.world} ranks and not on all nodes of a job of {group.size()}"
            if other.world == group.size():
                where = "not all nodes have it, or their ranks have moved"
            say(f"step {other.step} in memory cannot be used: {where}{on_disk}")

    def _may_all_save(self, step: int) -> bool:
        """Waits until all ranks have finished their last save. Returns whether this one can begin. Collective.

        If the last save has failed on a rank, all ranks drop their files of it. If a rank cannot save at all, no rank
        will from now on.
        """
        BACKGROUND.wait()
        problem = BACKGROUND.pop_problem()
        if problem is not None:
            self._note_failure(problem)
        is_off = self._reason_off is not None
        interval, has_failed, is_over, last, minus_first = group.max_over_ranks(
            [self._steps.wish, self._has_failed, is_off, step, -step]
        )
        self._steps.agree(int(interval))
        if is_over:
            if not is_off:
                say("no state is kept in memory from now on: another rank cannot save its own")
            self._stop()
            return False
        self._has_failed = False
        if has_failed:
            self._drop_last()
        if last != -minus_first:
            say(f"step {step} is not saved in memory: the ranks are at different steps, {-minus_first:g} to {last:g}")
            return False
        return True

    def _drop_last(self) -> None:
        """Drops this rank's file of the last save, which another rank could not finish."""
        if self._files is not None and self._agreed is not None:
            try:
                self._files.drop(self._last_saved, self._agreed.series)
            except OSError as problem:
                self._note_failure(problem)

    def _save(self, step: int) -> None:
        """Saves the state of a step. Raises nothing but what is not an Exception, such as an in-process restart."""
        if self._writer is None or self._agreed is None:
            return
        name = StateFile(step, group.rank(), group.size(), len(self._agreed.node_ranks), self._agreed.series)
        more = {**identity(name), "run_id": os.environ.get("TORCHELASTIC_RUN_ID", "")}
        self._last_saved = step
        try:
            copied = self._writer.copy(self._objects, self._without_tensors, name, more)
        except Exception as problem:
            self._note_failure(problem)
            return
        BACKGROUND.start(functools.partial(self._finish, copied))

    def _finish(self, copied: CopiedState) -> None:
        """Finishes a save. Runs in the background's thread."""
        assert self._writer is not None
        self._writer.finish(copied)
        self._failed_in_a_row = 0
        if not self._has_saved and copied.name.rank == 0 and self._told is not None:
            files = f"{self._told.keep + 1} files of {size_in_words(copied.layout.size)}"
            say(f"rank 0 keeps its state in memory: {files}, with checksums by {checksum.LIBRARY}")
        self._has_saved = True

    def _note_failure(self, problem: Exception) -> None:
        """Counts a save that has failed, and says why."""
        self.failures += 1
        self._failed_in_a_row += 1
        self._has_failed = True
        if isinstance(problem, (CannotBeKept, NoRoom)):
            self._reason_off = str(problem)
            say(f"no state is kept in memory: {problem}")
            return
        text = f"{type(problem).__name__}: {problem}"
        if self._failed_in_a_row < MAX_FAILURES:
            say(f"the state was not saved in memory, which is tried again: {text}")
            return
        self._reason_off = text
        say(f"no state is kept in memory from now on, after {self._failed_in_a_row} saves that failed: {text}")

    def _stop(self) -> None:
        """Saves nothing any more."""
        self._is_loaded = False
        self._writer = None
        if self._files is not None:
            BACKGROUND.wait()
            self._files.close()
            self._files = None
