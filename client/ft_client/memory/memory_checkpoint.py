"""The user's object that keeps the training's state in memory: `ft.MemoryCheckpoint`."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ft_client.memory import agreed_load, kept_state, progress
from ft_client.memory.agreed_load import NotRestored
from ft_client.memory.agreed_steps import AgreedSteps, OtherWorld
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.load_report import (
    line_of_other_world,
    line_of_step,
    lines_of_load,
    lines_of_refusal,
    message_of_load,
)
from ft_client.memory.node_folder import claim, read_settings, read_settings_in_group, say, say_on_rank_0, why_not
from ft_client.memory.progress import StepNotes
from ft_client.memory.rank_files import RankFiles
from ft_client.memory.state_saves import StateSaves, close_files
from ft_client.memory.tensor_parts import CannotBeKept
from ft_client.memory.to_launcher import tell
from ft_client.rank.agreement import group, roll_call
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import Generation, MemoryFiles, StateTier
from rank_monitor.contract.wire.messages import StateRefused

_LOAD, _STEP = "MemoryCheckpoint.load()", "MemoryCheckpoint.step()"


class MemoryCheckpoint:
    """Keeps the state of a training in the node's memory, where it outlives the ranks.

    Without the launcher every call does nothing, and `load()` returns 0. A save that fails never ends the training: one
    line on stderr says why. After three in a row, or when another try cannot help, no more saves are made.

    Example:

        keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler)
        start = keep.load(newer_than=step_on_disk)
        if not start:
            start = load_from_disk()
        for step in range(start, STEPS):
            train_step()
            keep.step(step + 1)

    Each rank's random numbers (Python, numpy, torch, the present CUDA device) are kept too. `load` and `step` are
    collective: all ranks of the process group call them after the same steps, `load` after `init_process_group`.

    Args:
        safe_types: types and functions that may be named in the objects' states beside those that torch's weights-only
            reader admits.
        overlap: whether saves overlap with the training: parameters and states of optimizers are copied during the next
            forward and backward pass, and the optimizer's next step waits for that. Where they cannot, a line says so.
        interval: steps between two saves, in the place of `--ft-memory-interval` of the launcher. None: that holds.
        objects: name -> what has `state_dict` and `load_state_dict`: modules (also in DDP, and after `fully_shard`),
            optimizers, schedulers, loaders.

    Raises:
        TypeError: an object lacks one of these methods.
        ValueError: the interval is less than 1.

    Attributes:
        loaded_world: how many ranks the job had that saved what `load` gave back; 0: it gave nothing back. Other than
            the number of ranks now: the state was put together for these, and random numbers and loaders begin anew.
    """

    _active: ClassVar[weakref.ref[MemoryCheckpoint] | None] = None
    """The object of this process that was loaded last: it alone uses the rank's files. It is not kept alive: in a
    restart in process the user's function makes the new model before the new object."""

    def __init__(
        self, *, safe_types: Sequence[Any] = (), overlap: bool = False, interval: int | None = None, **objects: Any
    ) -> None:
        self.loaded_world = 0
        if interval is not None and operator.index(interval) < 1:
            raise ValueError(f"MemoryCheckpoint(interval={interval}): the number of steps must be 1 or more")
        self._interval = interval
        self._wants_overlap = overlap
        self._objects: Mapping[str, Any] = objects
        self._safe_types = safe_types
        self._saves: StateSaves | None = None
        """The saves since the last `load`; None: there are none."""
        self._failures_before = 0
        """How many saves have failed before the last `load`."""
        self._is_load_missing = True
        """Whether `load` was never called, and no line has said so."""
        self._notes = StepNotes()
        """Where this rank notes each step."""
        self._refused = ""
        """Why the objects of this rank can never be kept."""
        if not objects:
            raise TypeError("MemoryCheckpoint() needs what it shall keep, such as model=..., optimizer=...")
        try:
            for name, kept in objects.items():
                kept_state.check_object(name, kept)
        except CannotBeKept as problem:
            self._refused = str(problem)

    @property
    def failures(self) -> int:
        """How many saves have failed on this rank."""
        if self._saves is None:
            return self._failures_before
        return self._failures_before + self._saves.failures

    def load(self, newer_than: int | None = 0) -> int:
        """Gives the newest state that all ranks have back to the objects. Returns its step; 0: there is none, and no
        object was changed, so the training goes on from the checkpoint on disk. Collective; called once before the
        training's loop, again in each in-process restart.

        Args:
            newer_than: the step of the newest checkpoint on disk: an older state in memory is not used. None as 0:
                there is no checkpoint. The largest value of all ranks counts.

        Raises:
            TypeError: the step is no whole number.
            RuntimeError: the job has several ranks and no process group yet. Or some ranks do not call this method:
                the error names them. Or objects have refused each state that the ranks could read, and some of them
                were changed: the next start begins without state in memory.
        """
        on_disk = operator.index(newer_than or 0)
        self._is_load_missing = False
        self.loaded_world = 0
        self._end_saves()
        self._notes = StepNotes()
        settings = read_settings_in_group(_LOAD)
        if settings is None:
            return 0
        if self._interval is not None:
            settings = replace(settings, interval=self._interval)
        roll_call.await_all(_LOAD)
        self._take_over()
        # From here to the last vote no rank may leave by what it alone knows: the others wait for it.
        refused = self._refused or why_not(settings) or claim(settings.folder)
        agreed = agreed_load.exchange(settings, on_disk, refused)
        if agreed.refusing_rank is not None:
            self._keep_nothing(settings, agreed)
            return 0
        try:
            restored = agreed_load.restore(settings.folder, agreed, self._objects, self._safe_types, say)
        except NotRestored as problem:
            _forget_all(settings)
            self._tell(settings, agreed, None, problem.refused)
            raise
        found = restored.generation
        saves = StateSaves(settings, agreed, self._objects, self._safe_types, found)
        if self._wants_overlap:
            saves.overlap()
        self._tell(settings, agreed, found, restored.refused)
        saves.notes = self._notes
        self._saves = saves
        for line in lines_of_load(found, agreed, group.size()):
            say_on_rank_0(line)
        if found is None:
            return 0
        self.loaded_world = found.world
        if isinstance(found, OtherWorld):
            say_on_rank_0(line_of_other_world(found, group.size(), restored.anew))
        return found.step

    def step(self, step: int) -> None:
        """Saves the state when that is due. Blocks while the state is copied. Collective; called after each step, once
        the optimizer has changed the parameters.

        Args:
            step: how many steps the training has done, which becomes the step that `load` returns.

        Raises:
            TypeError: the step is no whole number.
        """
        step = operator.index(step)
        self._notes.reached(step)
        if self._saves is not None:
            self._saves.step(step)
        elif self._is_load_missing:
            self._is_load_missing = False
            _say_load_is_missing()

    def _take_over(self) -> None:
        """Makes this object the one that uses the rank's files."""
        BACKGROUND.wait()
        BACKGROUND.pop_problem()
        active = None
        if MemoryCheckpoint._active is not None:
            active = MemoryCheckpoint._active()
        if active is not None:
            active._end_saves()
        MemoryCheckpoint._active = weakref.ref(self)
        close_files()

    def _end_saves(self) -> None:
        """Ends the saves of this object, once the last one has ended."""
        if self._saves is not None:
            BACKGROUND.wait()
            self._failures_before = self.failures
            self._saves.close()
            self._saves = None

    def _keep_nothing(self, settings: MemoryFiles, agreed: AgreedSteps) -> None:
        """Called where a rank can keep no state, so that none does. Complete generations stay, which nobody changes
        meanwhile: in the next start the reason may be gone."""
        if not why_not(settings) and not claim(settings.folder):
            with suppress(OSError):
                RankFiles(settings, group.rank()).remove_useless()
        self._tell(settings, agreed, None)
        for line in lines_of_refusal(agreed, bool(settings.folder)):
            say_on_rank_0(line)

    def _tell(
        self,
        settings: MemoryFiles,
        agreed: AgreedSteps,
        found: Generation | OtherWorld | None,
        refused: Sequence[StateRefused] = (),
    ) -> None:
        """Tells the launcher what `load` came to, and from where on the steps of this rank count.

        Called when all ranks have agreed: each has read what the others had reported before.

        Args:
            settings: what the launcher has said.
            agreed: what the ranks have agreed upon.
            found: what was loaded.
            refused: what was tried before.
        """
        message = message_of_load(found, refused, agreed, group.size(), _tier(settings, found))
        if not why_not(settings) and not claim(settings.folder):
            start = max(message.step, agreed.newer_than)
            self._notes = progress.begin(settings.folder, group.rank(), agreed.node_ranks, start)
        if not tell(message) and found is not None:
            say_on_rank_0(line_of_step(found.step, agreed.newer_than))


def _say_load_is_missing() -> None:
    """Says that `step` does nothing before `load`: to the user, on rank 0, and to ranks that are in `load`."""
    settings = read_settings()
    if settings is None:
        return
    roll_call.say_absent(_LOAD, instead=_STEP)
    if settings.folder:
        say_on_rank_0("no state is kept in memory: step() was called before load(), with which it begins")


def _tier(settings: MemoryFiles, found: Generation | OtherWorld | None) -> StateTier:
    """Returns where a generation lay before this start, by the marks that the launcher's processes have made."""
    if found is None:
        return StateTier.MEMORY
    folder = Path(settings.folder)
    if (folder / memory_files.copied_name(found.step, found.series)).exists():
        return StateTier.BUDDY
    if (folder / memory_files.flushed_name(found.step, found.series)).exists():
        return StateTier.FLUSH
    return StateTier.MEMORY


def _forget_all(settings: MemoryFiles) -> None:
    """Removes this rank's files, which no rank will use."""
    if not settings.folder:
        return
    with suppress(OSError):
        files = RankFiles(settings, group.rank())
        files.keep_only([])
        files.remove_useless()
