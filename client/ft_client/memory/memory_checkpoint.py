"""The user's object that keeps the training's state in memory: `ft.MemoryCheckpoint`."""

from __future__ import annotations

import functools
import json
import operator
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ft_client.memory import agreed_load, checksum, kept_state, overlap, progress, replicas, save_vote, step_folders
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
from ft_client.memory.overlap import Overlap
from ft_client.memory.overlapped_copy import StateChanged
from ft_client.memory.progress import StepNotes
from ft_client.memory.rank_files import RankFiles
from ft_client.memory.reshard_load import REPLICATED_ENTRY
from ft_client.memory.room import NoRoom
from ft_client.memory.save_steps import SaveSteps
from ft_client.memory.save_vote import NOT_COMPARED, UNKNOWN, Vote, VoteResult
from ft_client.memory.state_reader import identity
from ft_client.memory.state_writer import CopiedState, StateWriter
from ft_client.memory.tensor_parts import CannotBeKept
from ft_client.memory.to_launcher import tell
from ft_client.rank.agreement import group, roll_call
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import Generation, MemoryFiles, StateFile, StateTier
from rank_monitor.contract.memory_room import size_in_words
from rank_monitor.contract.wire.messages import StateRefused

_MAX_CHANGED = 2
"""Saves in a row that may fail because a tensor changed during the copy. Later saves copy all at once."""
MAX_FAILURES = 3
"""Saves in a row that may fail. What fails so often will go on to, and each try costs time."""
_COMPARED = 10
"""Saves from one comparison of the whole replicated state to the next; the first save has one. It takes the time of a
checksum: half of a copy's with isal, three of a copy's with zlib. Before each other save a sample is compared."""
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
        objects: name -> what has `state_dict` and `load_state_dict`: modules (also in DDP, and after `fully_shard`),
            optimizers, schedulers, loaders.

    Raises:
        TypeError: an object lacks one of these methods.

    Attributes:
        failures: how many saves have failed on this rank.
        loaded_world: how many ranks the job had that saved what `load` gave back; 0: it gave nothing back. Other than
            the number of ranks now: the state was put together for these, and random numbers and loaders begin anew.
    """

    _active: ClassVar[weakref.ref[MemoryCheckpoint] | None] = None
    """The object of this process that was loaded last: it alone uses the rank's files. It is not kept alive: in a
    restart in process the user's function makes the new model before the new object."""
    _files: ClassVar[RankFiles | None] = None
    """The files of this rank, as that object uses them."""

    def __init__(self, *, safe_types: Sequence[Any] = (), overlap: bool = False, **objects: Any) -> None:
        self.failures = 0
        self.loaded_world = 0
        self._wants_overlap = overlap
        self._overlap: Overlap | None = None
        """None: saves copy all at once."""
        self._objects: Mapping[str, Any] = objects
        self._safe_types = safe_types
        self._writer: StateWriter | None = None
        """None: this rank cannot save."""
        self._is_loaded = False
        """Whether `step` has something to do; the same on all ranks."""
        self._is_load_missing = True
        """Whether `load` was never called, and no line has said so."""
        self._failed_in_a_row = 0
        self._has_failed = False
        """Whether the last save has failed on this rank."""
        self._last_step = 0
        self._has_gone_back = False
        """Whether the user knows that a step has followed a later one."""
        self._last_saved = 0
        self._has_saved = False
        self._settings: MemoryFiles | None = None
        self._agreed: AgreedSteps | None = None
        self._progress = StepNotes()
        """Where this rank notes each step, for the next `load` and for the launcher."""
        self._steps = SaveSteps(1, 0)
        self._replicated: frozenset[str] = frozenset()
        """The names of the objects that should be the same on all ranks, of which one rank of a node writes them."""
        self._alike: frozenset[str] = frozenset()
        """The same, but also in a job of one rank: for the files."""
        self._has_other_world = False
        """Whether files of a job with another number of ranks are kept, until this job has a generation of its own."""
        self._is_unconfirmed = False
        """Whether the ranks have begun a save of which they do not know yet whether all have it; the same on all."""
        self._has_voted = False
        """Whether the ranks have found since `load` that they are at the same step."""
        self._begun = 0
        """Saves since `load`; the same on all ranks."""
        self._refused = ""
        """Why the objects of this rank can never be kept."""
        if not objects:
            raise TypeError("MemoryCheckpoint() needs what it shall keep, such as model=..., optimizer=...")
        try:
            for name, kept in objects.items():
                kept_state.check_object(name, kept)
        except CannotBeKept as problem:
            self._refused = str(problem)
        self._reason_off: str | None = None
        """Why this rank saves nothing any more."""

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
        self._is_loaded = self._is_load_missing = False
        self.loaded_world = 0
        self._progress = StepNotes()
        self._settings = read_settings_in_group(_LOAD)
        if self._settings is None:
            return 0
        roll_call.await_all(_LOAD)
        self._take_over()
        # From here to the last vote no rank may leave by what it alone knows: the others wait for it.
        refused = self._refused or why_not(self._settings) or claim(self._settings.folder)
        agreed = self._agreed = agreed_load.exchange(self._settings, on_disk, refused)
        if agreed.refusing_rank is not None:
            self._keep_nothing(agreed)
            return 0
        try:
            restored = agreed_load.restore(self._settings.folder, agreed, self._objects, self._safe_types, say)
        except NotRestored as problem:
            self._forget_all()
            self._tell(None, problem.refused)
            raise
        found = restored.generation
        self._start_saving(found)
        self._tell(found, restored.refused)
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
        self._progress.reached(step)
        if not self._is_loaded:
            self._say_load_is_missing()
            return
        if step < self._last_step and not self._has_gone_back:
            self._has_gone_back = True
            say_on_rank_0(f"step {step} follows step {self._last_step}: it is not saved in memory, nor others like it")
        self._last_step = step
        began = time.monotonic()
        self._count_blocked()
        if not self._steps.is_due(step, began):
            self._vote_once(step)
            return
        vote = self._vote(step, is_saving=True)
        ready = time.monotonic()
        may_save = self._agree_on_save(vote)
        agreed = time.monotonic()
        if may_save:
            self._save(step)
        ended = time.monotonic()
        cost_s = ended - agreed + ready - began
        self._steps.saved(step, began, ended, cost_s)
        self._progress.cost(cost_s)

    def _count_blocked(self) -> None:
        """Adds to the cost of the last save for how long optimizers have waited for its copy."""
        if self._overlap is None:
            return
        blocked_s = self._overlap.pop_blocked_s()
        if blocked_s > 0:
            self._steps.cost_more(blocked_s)
            self._progress.cost(blocked_s)

    def _begin_overlap(self) -> None:
        """Has later saves overlap with the training, where the user wants it and the objects can."""
        if not self._wants_overlap:
            return
        reason = overlap.why_not(self._objects)
        if reason:
            say_on_rank_0(f"saves in memory do not overlap with the training: {reason}")
        else:
            self._overlap = Overlap(self._objects)

    def _end_overlap(self) -> None:
        """Has later saves copy all at once. Called when the background's thread has nothing to do."""
        if self._overlap is not None:
            self._overlap.close()
            self._overlap = None

    def _say_load_is_missing(self) -> None:
        """Says once that `step` does nothing before `load`: to the user, on rank 0, and to ranks that are in `load`."""
        if not self._is_load_missing:
            return
        self._is_load_missing = False
        settings = read_settings()
        if settings is None:
            return
        roll_call.say_absent(_LOAD, instead=_STEP)
        if settings.folder:
            say_on_rank_0("no state is kept in memory: step() was called before load(), with which it begins")

    def _tell(self, found: Generation | OtherWorld | None, refused: Sequence[StateRefused] = ()) -> None:
        """Tells the launcher what `load` came to, and from where on the steps of this rank count.

        Called when all ranks have agreed: each has read what the others had reported before.

        Args:
            found: what was loaded.
            refused: what was tried before.
        """
        assert self._settings is not None and self._agreed is not None
        agreed = self._agreed
        where = StateTier.MEMORY
        if found is not None and self._is_flushed(found):
            where = StateTier.FLUSH
        message = message_of_load(found, refused, agreed, group.size(), where)
        if not why_not(self._settings) and not claim(self._settings.folder):
            start = max(message.step, agreed.newer_than)
            self._progress = progress.begin(self._settings.folder, group.rank(), agreed.node_ranks, start)
        if not tell(message) and found is not None:
            say_on_rank_0(line_of_step(found.step, agreed.newer_than))

    def _is_flushed(self, found: Generation | OtherWorld) -> bool:
        """Returns whether the launcher has brought a generation back from shared storage."""
        assert self._settings is not None
        return (Path(self._settings.folder) / memory_files.flushed_name(found.step, found.series)).exists()

    def _take_over(self) -> None:
        """Makes this object the one that uses the rank's files."""
        BACKGROUND.wait()
        BACKGROUND.pop_problem()
        active = None
        if MemoryCheckpoint._active is not None:
            active = MemoryCheckpoint._active()
        if active is not None:
            active._is_loaded = False
            active._writer = None
            active._end_overlap()
        MemoryCheckpoint._active = weakref.ref(self)
        self._close_files()

    def _keep_nothing(self, agreed: AgreedSteps) -> None:
        """Called where a rank can keep no state, so that none does. Complete generations stay, which nobody changes
        meanwhile: in the next start the reason may be gone."""
        assert self._settings is not None
        if not why_not(self._settings) and not claim(self._settings.folder):
            with suppress(OSError):
                RankFiles(self._settings, group.rank()).remove_useless()
        self._tell(None)
        for line in lines_of_refusal(agreed, bool(self._settings.folder)):
            say_on_rank_0(line)

    def _forget_all(self) -> None:
        """Removes this rank's files, which no rank will use."""
        if self._settings is None or not self._settings.folder:
            return
        with suppress(OSError):
            files = RankFiles(self._settings, group.rank())
            files.keep_only([])
            files.remove_useless()

    def _kept(self, found: Generation | OtherWorld | None) -> Sequence[Generation | OtherWorld]:
        """Returns the generations whose files stay. Where the job has none of its own yet, these are of a job with
        another number of ranks: a fault before the first save must not leave nothing."""
        assert self._agreed is not None
        if isinstance(found, Generation):
            same_world = [one for one in self._agreed.candidates if isinstance(one, Generation)]
            return [generation for generation in same_world if generation.step <= found.step]
        if found is not None:
            return [found]
        return [one for one in self._agreed.candidates if isinstance(one, OtherWorld)][:1]

    def _start_saving(self, found: Generation | OtherWorld | None) -> None:
        """Makes all ready for saves."""
        assert self._settings is not None and self._agreed is not None
        self._last_step = self._agreed.newer_than
        if found is not None:
            self._last_step = found.step
        kept = self._kept(found)
        self._has_other_world = any(isinstance(one, OtherWorld) for one in kept)
        self._is_unconfirmed = False
        self._reason_off = None
        self._failed_in_a_row = 0
        self._has_failed = False
        self._has_gone_back = False
        self._has_voted = False
        self._begun = 0
        self._steps = SaveSteps(self._agreed.interval, self._last_step, self._agreed.no_save_until)
        self._replicated = replicas.replicated(self._objects, group.size())
        self._alike = replicas.alike(self._objects, group.size())
        try:
            self._open_files(kept)
        except OSError as problem:
            self._reason_off = str(problem)
            say(f"no state is kept in memory: {problem}")
        self._begin_overlap()
        self._is_loaded = True

    def _open_files(self, kept: Sequence[Generation | OtherWorld]) -> None:
        """Makes this rank's files ready. Raises OSError: they cannot be used."""
        assert self._settings is not None and self._agreed is not None
        files = MemoryCheckpoint._files = RankFiles(self._settings, group.rank())
        files.keep_only(kept)
        if group.rank() == self._agreed.node_ranks[0]:
            files.remove_others(self._agreed.node_ranks, kept)
            # After `keep_only`: this rank's files of what is set aside are unfinished now, so no generation is complete
            # with them, whatever happens to the other ranks before they do the same.
            step_folders.remove_set_aside(Path(self._settings.folder), keeps_files=True)
        self._writer = StateWriter(files, self._safe_types)

    def _vote_once(self, step: int) -> None:
        """Finds out in the first step after `load`, also where no save is due, whether all ranks are at the same step.
        Collective.

        Else one rank might find a save due in another call than the others. Its all-reduce would be paired with one of
        the training.
        """
        if not self._has_voted:
            self._are_at_one_step(save_vote.exchange(self._vote(step, is_saving=False)))

    def _are_at_one_step(self, votes: VoteResult) -> bool:
        """Returns whether all ranks are at the same step. If they never were, no rank saves from now on."""
        if votes.first_step == votes.last_step:
            self._has_voted = True
            return True
        steps = f"the ranks are at different steps, {votes.first_step} to {votes.last_step}"
        if self._has_voted:
            say_on_rank_0(f"a step is not saved in memory: {steps}")
        else:
            say_on_rank_0(f"no state is kept in memory: {steps}")
            self._stop()
        return False

    def _vote(self, step: int, is_saving: bool) -> Vote:
        """Waits until this rank's last save has ended. Returns what this rank says at the beginning of a save."""
        BACKGROUND.wait()
        problem = BACKGROUND.pop_problem()
        if problem is not None:
            self._note_failure(problem)
        has_failed = self._has_failed
        self._has_failed = False
        compared = NOT_COMPARED
        if is_saving:
            compared = self._checksum()
        return Vote(self._steps.wish, has_failed, self._reason_off is not None, step, compared)

    def _checksum(self) -> int:
        """Returns the checksum of the replicated state, or of a sample."""
        if not self._replicated:
            return NOT_COMPARED
        try:
            if self._begun % _COMPARED != 0:
                return replicas.sample_checksum(self._objects, self._replicated)
            return replicas.replicated_checksum(self._objects, self._replicated)
        except Exception as problem:  # also of the user's `state_dict`
            self._note_failure(problem)
            return UNKNOWN

    def _agree_on_save(self, vote: Vote) -> bool:
        """Returns whether all ranks begin a save. Collective.

        If the last save has failed on a rank, all ranks drop their files of it. If a rank cannot save at all, no rank
        will from now on. If the replicated state differs by rank, each rank saves its own from now on.

        `vote`: of this rank.
        """
        votes = save_vote.exchange(vote)
        self._steps.agree(votes.interval)
        if votes.has_any_failed:
            self._drop(self._last_saved)
        elif self._is_unconfirmed:
            self._forget_other_world()
        self._is_unconfirmed = False
        if votes.is_any_off:
            if not vote.is_off:
                say_on_rank_0("no state is kept in memory from now on: another rank cannot save its own")
            self._stop()
            return False
        if not self._are_at_one_step(votes):
            return False
        if not votes.is_compared:
            # This save has failed on a rank; the last one is not dropped for it.
            self._last_saved = vote.step
            return False
        self._begun += 1
        self._is_unconfirmed = True
        if not votes.is_alike:
            self._keep_own()
        return True

    def _forget_other_world(self) -> None:
        """Gives up the files of a job with another number of ranks: once all ranks have a generation of this job."""
        files = MemoryCheckpoint._files
        if not self._has_other_world or files is None or self._agreed is None:
            return
        self._has_other_world = False
        with suppress(OSError):
            files.make_unfinished_but(group.size())
            files.remove_others(self._agreed.node_ranks)

    def _keep_own(self) -> None:
        """Has each rank save all objects itself, and drops what this training has saved otherwise: the ranks of a node
        would get another rank's state."""
        if self._replicated:
            names = ", ".join(sorted(self._replicated))
            what = f"{names} should be the same on all ranks and are not"
            say_on_rank_0(f"{what}: each rank keeps its own in memory from now on")
        self._replicated = self._alike = frozenset()
        self._drop(None)

    def _drop(self, step: int | None) -> None:
        """Drops this rank's files of the present series; where a step is given, only that one's."""
        if MemoryCheckpoint._files is not None and self._agreed is not None:
            try:
                MemoryCheckpoint._files.make_unfinished(self._agreed.series, step)
            except OSError as problem:
                self._note_failure(problem)

    def _save(self, step: int) -> None:
        """Saves the state of a step. Raises nothing but what is not an Exception, such as an in-process restart."""
        if self._writer is None or self._agreed is None:
            return
        name = StateFile(step, group.rank(), group.size(), len(self._agreed.node_ranks), self._agreed.series)
        more = {
            **identity(name),
            "run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            REPLICATED_ENTRY: json.dumps(sorted(self._alike)),
        }
        self._last_saved = step
        without: frozenset[str] = frozenset()
        if group.rank() != self._agreed.node_ranks[0]:
            without = self._replicated
        copy = functools.partial(self._writer.copy, self._objects, without, name, more, self._overlap is not None)
        try:
            try:
                copied = copy()
            except NoRoom as problem:
                if not self._has_other_world:
                    raise
                say(f"the state of the job with another number of ranks is given up for the new one: {problem}")
                self._forget_other_world()
                copied = copy()
        except Exception as problem:
            self._note_failure(problem)
            return
        BACKGROUND.start(functools.partial(self._finish, copied))
        if self._overlap is not None:
            # Not before the thread has the copy: an interrupt between the two would leave a step that waits for ever.
            self._overlap.begins(copied.later)

    def _finish(self, copied: CopiedState) -> None:
        """Finishes a save. Runs in the background's thread."""
        assert self._writer is not None
        self._writer.finish(copied)
        self._failed_in_a_row = 0
        self._progress.saved(copied.layout.size)
        if not self._has_saved and copied.name.rank == 0 and self._settings is not None:
            files = f"{self._settings.keep + 1} files of {size_in_words(copied.layout.size)}"
            say(f"rank 0 keeps its state in memory: {files}, with checksums by {checksum.LIBRARY}")
        self._has_saved = True

    def _note_failure(self, problem: Exception) -> None:
        """Counts a save that has failed, and says why."""
        self.failures += 1
        self._failed_in_a_row += 1
        self._has_failed = True
        self._progress.failed()
        if isinstance(problem, (CannotBeKept, NoRoom)):
            self._reason_off = str(problem)
            say(f"no state is kept in memory: {problem}")
            return
        text = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, StateChanged) and self._failed_in_a_row >= _MAX_CHANGED and self._overlap is not None:
            self._end_overlap()
            say(f"saves in memory do not overlap with the training from now on: {problem}")
            return
        if self._failed_in_a_row < MAX_FAILURES:
            say(f"the state was not saved in memory, which is tried again: {text}")
            return
        self._reason_off = text
        say(f"no state is kept in memory from now on, after {self._failed_in_a_row} saves that failed: {text}")

    def _stop(self) -> None:
        """Saves nothing any more, as all ranks do. The memory that this takes is free again, but for complete
        generations."""
        self._is_loaded = False
        self._writer = None
        if self._overlap is not None:
            BACKGROUND.wait()
            self._end_overlap()
        if MemoryCheckpoint._files is not None:
            BACKGROUND.wait()
            with suppress(OSError):
                MemoryCheckpoint._files.remove_useless()
            self._close_files()

    @staticmethod
    def _close_files() -> None:
        """Closes this rank's files. Called when the background's thread has nothing to do."""
        files = MemoryCheckpoint._files
        if files is not None:
            MemoryCheckpoint._files = None
            files.close()
