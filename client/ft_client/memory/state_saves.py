"""The saves of a training in memory, from one `MemoryCheckpoint.load` to the next: `StateSaves`.

**A save**, all in `step` but for the last point:

1. It is due by the interval (`save_steps.py`); all ranks find that in the same call.
2. Each rank waits until its last save has ended, and says in one exchange (`save_vote.py`) whether that failed, at
   which step it is, and a checksum of the state that should be the same on all ranks.
3. If the last save failed on any rank, all ranks drop their files of it. If a rank cannot save at all, none does from
   now on. If the state differs by rank, each rank writes all of its own from now on.
4. Each rank copies its state into a file (`state_writer.py`), at once or, with overlap, during the next forward and
   backward pass (`overlap.py`).
5. The thread `ft_memory` (`background_work.py`) completes the copy, computes the checksums and gives the file its name.
   What comes of that, the next save tells the others.

The main thread runs all else. Between two saves nothing here runs but a few comparisons in `step`.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ft_client.memory import checksum, overlap, replicas, save_vote, step_folders
from ft_client.memory.agreed_steps import AgreedSteps, OtherWorld
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.node_folder import say, say_on_rank_0
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
from ft_client.rank.agreement import group
from rank_monitor.contract.memory_files import Generation, MemoryFiles, StateFile
from rank_monitor.contract.memory_room import size_in_words

_MAX_CHANGED = 2
"""Saves in a row that may fail because a tensor changed during the copy. Later saves copy all at once."""
MAX_FAILURES = 3
"""Saves in a row that may fail. What fails so often will go on to, and each try costs time."""
_COMPARED = 10
"""Saves from one comparison of the whole replicated state to the next; the first save has one. It takes the time of a
checksum: half of a copy's with isal, three of a copy's with zlib. Before each other save a sample is compared."""


class StateSaves:
    """The saves of this rank after one `load`. All ranks make it and call `step` after the same steps.

    Args:
        settings: what the launcher has said.
        agreed: what the ranks have agreed upon in `load`.
        objects: name -> what is kept.
        safe_types: as of `MemoryCheckpoint`.
        found: what `load` has given back; None: nothing.

    Attributes:
        failures: how many saves have failed on this rank.
        notes: where this rank notes each step and save, for the next `load` and for the launcher.
    """

    _files: ClassVar[RankFiles | None] = None
    """The files of this rank, which one object of the process uses at a time: the one that was made last."""

    def __init__(
        self,
        settings: MemoryFiles,
        agreed: AgreedSteps,
        objects: Mapping[str, Any],
        safe_types: Sequence[Any],
        found: Generation | OtherWorld | None,
    ) -> None:
        self.failures = 0
        self.notes = StepNotes()
        self._settings = settings
        self._agreed = agreed
        self._objects = objects
        self._safe_types = safe_types
        self._writer: StateWriter | None = None
        """None: this rank cannot save."""
        self._is_on = True
        """Whether `step` may save; the same on all ranks."""
        self._reason_off: str | None = None
        """Why this rank saves nothing any more."""
        self._overlap: Overlap | None = None
        """None: saves copy all at once."""
        self._failed_in_a_row = 0
        self._has_failed = False
        """Whether the last save has failed on this rank."""
        self._last_step = agreed.newer_than
        if found is not None:
            self._last_step = found.step
        self._has_gone_back = False
        """Whether the user knows that a step has followed a later one."""
        self._last_saved = 0
        self._has_saved = False
        self._has_voted = False
        """Whether the ranks have found that they are at the same step."""
        self._is_unconfirmed = False
        """Whether the ranks have begun a save of which they do not know yet whether all have it; the same on all."""
        self._begun = 0
        """How many saves all ranks have begun; the same on all ranks."""
        self._steps = SaveSteps(agreed.interval, self._last_step, agreed.no_save_until)
        self._replicated = replicas.replicated(objects, group.size())
        """The names of the objects that should be the same on all ranks, of which one rank of a node writes them."""
        self._alike = replicas.alike(objects, group.size())
        """The same, but also in a job of one rank: for the files."""
        kept = _kept(found, agreed)
        self._has_other_world = any(isinstance(one, OtherWorld) for one in kept)
        """Whether files of a job with another number of ranks are kept, until this job has a generation of its own."""
        try:
            self._open_files(kept)
        except OSError as problem:
            self._reason_off = str(problem)
            say(f"no state is kept in memory: {problem}")

    def overlap(self) -> None:
        """Has later saves overlap with the training, where the objects can; else a line says why they cannot."""
        reason = overlap.why_not(self._objects)
        if reason:
            say_on_rank_0(f"saves in memory do not overlap with the training: {reason}")
        else:
            self._overlap = Overlap(self._objects)

    def step(self, step: int) -> None:
        """Saves the state after a step when that is due. Blocks while it is copied. Collective."""
        if not self._is_on:
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
        self.notes.cost(cost_s)

    def close(self) -> None:
        """Has this object save nothing any more: another one uses the rank's files. The last save has ended."""
        self._is_on = False
        self._writer = None
        self._end_overlap()

    def _count_blocked(self) -> None:
        """Adds to the cost of the last save for how long optimizers have waited for its copy."""
        if self._overlap is None:
            return
        blocked_s = self._overlap.pop_blocked_s()
        if blocked_s > 0:
            self._steps.cost_more(blocked_s)
            self.notes.cost(blocked_s)

    def _end_overlap(self) -> None:
        """Has later saves copy all at once. Called when the background's thread has nothing to do."""
        if self._overlap is not None:
            self._overlap.close()
            self._overlap = None

    def _open_files(self, kept: Sequence[Generation | OtherWorld]) -> None:
        """Makes this rank's files ready. Raises OSError: they cannot be used."""
        files = StateSaves._files = RankFiles(self._settings, group.rank())
        files.keep_only(kept)
        if group.rank() == self._agreed.node_ranks[0]:
            files.remove_others(self._agreed.node_ranks, kept)
            # After `keep_only`: this rank's files of what is set aside are unfinished now, so no generation is complete
            # with them, whatever happens to the other ranks before they do the same.
            step_folders.remove_set_aside(Path(self._settings.folder), keeps_files=True)
        self._writer = StateWriter(files, self._safe_types)

    def _vote_once(self, step: int) -> None:
        """Finds out in the first step, also where no save is due, whether all ranks are at the same step.
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
        files = StateSaves._files
        if not self._has_other_world or files is None:
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
        if StateSaves._files is not None:
            try:
                StateSaves._files.make_unfinished(self._agreed.series, step)
            except OSError as problem:
                self._note_failure(problem)

    def _save(self, step: int) -> None:
        """Saves the state of a step. Raises nothing but what is not an Exception, such as an in-process restart."""
        if self._writer is None:
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
        self.notes.saved(copied.layout.size)
        if not self._has_saved and copied.name.rank == 0:
            files = f"{self._settings.keep + 1} files of {size_in_words(copied.layout.size)}"
            say(f"rank 0 keeps its state in memory: {files}, with checksums by {checksum.LIBRARY}")
        self._has_saved = True

    def _note_failure(self, problem: Exception) -> None:
        """Counts a save that has failed, and says why."""
        self.failures += 1
        self._failed_in_a_row += 1
        self._has_failed = True
        self.notes.failed()
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
        self._is_on = False
        self._writer = None
        if self._overlap is not None:
            BACKGROUND.wait()
            self._end_overlap()
        if StateSaves._files is not None:
            BACKGROUND.wait()
            with suppress(OSError):
                StateSaves._files.remove_useless()
            close_files()


def close_files() -> None:
    """Closes the files of this rank, whichever object has used them. Called when the background's thread has nothing to
    do."""
    files = StateSaves._files
    if files is not None:
        StateSaves._files = None
        files.close()


def _kept(found: Generation | OtherWorld | None, agreed: AgreedSteps) -> Sequence[Generation | OtherWorld]:
    """Returns the generations whose files stay. Where the job has none of its own yet, these are of a job with
    another number of ranks: a fault before the first save must not leave nothing."""
    if isinstance(found, Generation):
        same_world = [one for one in agreed.candidates if isinstance(one, Generation)]
        return [generation for generation in same_world if generation.step <= found.step]
    if found is not None:
        return [found]
    return [one for one in agreed.candidates if isinstance(one, OtherWorld)][:1]
