"""`BaseCheckpointManager`: how the ranks save and load their parts together, wherever these lie.

Names, arguments and hooks are the peer's. What differs:

- A save that fails ends no training: one line says why. After three in a row no more are made.
- A load takes the newest save that all ranks can read and verify, and parts of one save only (`agreement.py`).
- Nothing is replicated: a part is a pickle, and none from another rank is read.

All public methods but the constructor are collective.
"""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

import torch

from ft_client.integrations.local_checkpoints.agreement import (
    Bid,
    Save,
    SaveVerdict,
    SeenSaves,
    common_saves,
    decide_save,
    newest_left_out,
    seen_saves,
)
from ft_client.integrations.local_checkpoints.async_request import AsyncRequest, SentState, nothing
from ft_client.integrations.local_checkpoints.debug import debug_time
from ft_client.integrations.local_checkpoints.state_dicts import TensorAwareStateDict
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.node_folder import say, say_on_rank_0
from ft_client.rank.agreement import group

logger = getLogger("ft_client")

MAX_FAILURES = 3
"""Saves in a row that may fail, as for `MemoryCheckpoint`."""
_SAID_AGAIN = 10
"""Saves in a row that are left out, from one line about that to the next: a save that never ends shall be seen."""
_COPIES_DO_NOT_FIT = "the copies for a persistent worker do not fit into the shared memory beside the parts"
_NOT_REPLICATED = (
    "local checkpoints are not replicated: they are pickles, and none from another node is read. Each node keeps those"
    " of its ranks"
)

CkptID = tuple[int, int, Any]
"""Iteration, rank and session of a part."""


class CheckpointingException(Exception):
    """A part cannot be loaded."""


class SameMachineReplicationException(CheckpointingException):
    """Never raised here. Programs import its name."""

    def __init__(self, ckpt_id: CkptID) -> None:
        super().__init__(f"{ckpt_id} is there already")


class BaseCheckpointManager(ABC):
    """Saves and loads the parts of a checkpoint by hooks of a subclass.

    Args:
        session_id: tells the checkpoints of one program from those of others.
        repl_strategy: refused with one line: nothing is replicated.

    Attributes:
        latest_iteration: what `find_latest` has found; -1: nothing is known.
        failures: how many saves have failed; the same on all ranks.
    """

    def __init__(self, session_id: Any, repl_strategy: object | None = None) -> None:
        self.latest_iteration = -1
        self.session_id = session_id
        self.repl_strategy = None
        self.failures = 0
        self._failed_in_a_row = 0
        self._rank: int | None = None
        self._token = ""
        """Of the save that was begun last."""
        self._agreed_token = ""
        """Of the save that is loaded."""
        self._size = 1
        """How many ranks the job had at the beginning of that save."""
        self._replaced = ""
        """The token of the part that had the name of the new one when that save began; empty: there was none."""
        self._nodes: list[Any] = []
        """By rank, what tells its node from others; as of that save."""
        self._copies_fit = True
        self._in_flight: Save | None = None
        """An asynchronous save of which it is not known yet whether it is whole."""
        self._settled: set[Save] = set()
        """Asynchronous saves that are known to be whole before the program has finalized them."""
        self._late = 0
        """How many saves in a row were left out."""
        self._complete: int | None = None
        """The newest iteration that all ranks are known to have."""
        self._look: SeenSaves | None = None
        """The last one for the newest iteration."""
        self._is_told = False
        """Whether the launcher knows what it came to."""
        if repl_strategy is not None:
            say_on_rank_0(_NOT_REPLICATED)

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        if self._rank is None:
            self._rank = group.rank()
        return self._rank

    def _ckpt_id(self, iteration: int) -> CkptID:
        """Returns what names this rank's part of an iteration.

        Raises:
            CheckpointingException: the iteration is negative.
        """
        if iteration < 0:
            raise CheckpointingException(f"an iteration is not negative: {iteration}")
        return iteration, self.rank, self.session_id

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Returns the parts that are here."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Reads a part. Raises whatever says why it cannot be read."""

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Writes a part, perhaps in another process. Raises whatever says why it cannot be written."""

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Removes what nobody loads any more, once all ranks have this iteration."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Removes what a failed save of this iteration has left."""

    def _prepare(self) -> None:  # noqa: B027 - a subclass needs none
        """Raises RuntimeError where a rank cannot be asked yet. Called first by each method that asks others."""

    def _token_of(self, ckpt_id: CkptID) -> str:
        """Returns the token of a part; empty: it has none."""
        return ""

    def _place(self) -> tuple[str, int]:
        """Returns what tells this rank's node from others, and the last iteration that was noted there. Does not
        fail."""
        return str(self.rank), 0

    def _forget_bad(self, seen: SeenSaves) -> None:  # noqa: B027 - not all have a launcher
        """Removes what the launcher has set aside, of which no rank has offered anything. Collective."""

    def _on_look(self, found: Save | None, seen: SeenSaves) -> None:  # noqa: B027 - not all have notes
        """Tells the launcher what a look came to. Called once for each look, on all ranks alike; once more where a
        later look finds nothing only after a save."""

    def _on_save(self, iteration: int, cost_s: float) -> None:  # noqa: B027 - not all have notes
        """Notes for the launcher that a save has held up the training for so long (seconds)."""

    def _on_saved(self, is_whole: bool) -> None:  # noqa: B027 - not all have notes
        """Notes for the launcher what became of a save."""

    def _bid(self, state_dict: TensorAwareStateDict) -> Bid:
        """Returns what this rank says before a save. Does not fail."""
        return Bid(str(self.rank), "", 0, 0, 0, 0, "")

    def _make_room(self, kept: Collection[int] | None) -> str:
        """Removes parts that nobody loads any more, before a save. Does not fail.

        Args:
            kept: the iterations of the parts that stay; empty: the newest one stays; None: all whole parts stay.

        Returns:
            Why this rank cannot save; empty: it can.
        """
        return ""

    def _on_node(self, node_ranks: Collection[int]) -> None:  # noqa: B027 - a subclass may have nothing in common
        """Removes what writers of ranks that are not on this node have left. Called before a save, once the ranks of
        the node are known. Does not fail."""

    @property
    def _node_ranks(self) -> list[int]:
        """The ranks of this rank's node, as of the last save."""
        return [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self.rank]]

    def find_latest(self) -> int:
        """Returns the newest iteration of which all ranks have a part of the same save, each verified and read; -1:
        there is none. Collective.

        A part that cannot be read here will not be read by `load` either, and the training would end. So the state is
        read now. It is dropped again: a program whose checkpoint on disk is newer never calls `load`.
        """
        self._prepare()
        if self.latest_iteration != -1:
            return self.latest_iteration
        BACKGROUND.wait()
        own = [[save.iteration, save.token] for save in self._saves()]
        self._look = seen_saves(group.gather_json([*self._place(), os.urandom(4).hex(), own]), self.rank)
        self._forget_bad(self._look)
        common = common_saves(self._look.offers)
        for save in common:
            if self._is_read_everywhere(save):
                self._complete = self.latest_iteration = save.iteration
                self._is_told = False
                return save.iteration
        left_out = newest_left_out(self._look.offers, common)
        if left_out is not None:
            say_on_rank_0(
                f"the local checkpoint of iteration {left_out} cannot be used: not all ranks have a part of the same"
                " save"
            )
        self._tell(None)
        return -1

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Returns the state of the iteration that `find_latest` has found, on its devices, and what names this rank's
        part. Collective.

        Raises:
            CheckpointingException: `find_latest` has found none, or a rank cannot read its part. The part stays.
        """
        if self.latest_iteration == -1:
            raise CheckpointingException("find_latest() has found no local checkpoint to load, or was not called")
        ckpt_id = self._ckpt_id(self.latest_iteration)
        problem = ""
        state: TensorAwareStateDict | None = None
        try:
            state = self._load(ckpt_id)
        except Exception as error:
            problem = _words(error)
        first = _first_problem(problem)
        if first or state is None:
            raise CheckpointingException(f"the local checkpoint of iteration {ckpt_id[0]} cannot be loaded: {first}")
        self._tell(Save(ckpt_id[0], self._agreed_token))
        state.restore_tensor_device(non_blocking=False)
        return state, ckpt_id

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Saves this rank's part. Collective. A save that fails is said by one line, and ends no training.

        Args:
            state_dict: the state of this rank. Its tensors are replaced by copies on the host.
            iteration: how many steps the training has done.
            is_async: whether the part is written later, by the process that carries out the returned request.

        Returns:
            The request; None: the part is written.
        """
        self._prepare()
        ckpt_id = self._ckpt_id(iteration)
        began = time.monotonic()
        self.latest_iteration = -1
        self._is_told = False
        refused = self._why_off(iteration) or self._begin(state_dict, iteration)
        then: list[Callable[[], Any]] = []
        if refused:
            if is_async:
                then.append(then.clear)
                return AsyncRequest(nothing, (), then, {})
            return None
        problem = self._copy_to_host(state_dict)
        save = Save(iteration, self._token)
        if is_async:
            self._in_flight = save
            self._on_save(iteration, time.monotonic() - began)
            then.append(partial(self._finalize, save, problem, then))
            if problem:
                return AsyncRequest(nothing, (), then, {})
            sent = SentState(state_dict, "" if self._copies_fit else _COPIES_DO_NOT_FIT)
            return AsyncRequest(_write_in_another_process, (self, sent, ckpt_id), then, {})
        if not problem:
            problem = _problem_of(partial(self._save_fn, {ckpt_id: state_dict}))
        self._on_save(iteration, time.monotonic() - began)
        self._settle(save, problem, is_async=False)
        return None

    def _save_fn(self, id_to_state_dict: dict[CkptID, TensorAwareStateDict]) -> None:
        """Writes parts, without a pause by Python's collector of garbage."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            for ckpt_id, state_dict in id_to_state_dict.items():
                self._save(state_dict, ckpt_id)
        finally:
            if was_on:
                gc.enable()

    def _why_off(self, iteration: int) -> str:
        """Returns why nothing is tried; the same on all ranks. Empty: a save is tried."""
        if self._failed_in_a_row >= MAX_FAILURES:
            return "off"
        if self._in_flight is None:
            return ""
        # The program's queue finalizes in order: this save may be whole while a checkpoint on disk is still written.
        missing = ""
        if not self._is_here(self._in_flight):
            missing = "its part is not there yet"
        if not _first_problem(missing):
            self._settled.add(self._in_flight)
            self._settle(self._in_flight, "", is_async=True)
            return ""
        if self._late % _SAID_AGAIN == 0:
            say_on_rank_0(
                f"the local checkpoint of iteration {iteration} is left out: that of iteration"
                f" {self._in_flight.iteration} is still being written"
            )
        self._late += 1
        return "late"

    def _kept(self) -> set[int] | None:
        """Returns the iterations that must stay until the next one is whole on all ranks; empty: this rank's newest,
        which not all have; None: nobody has looked."""
        if self._complete is not None:
            return {self._complete}
        if self._look is None:
            return None
        return {save.iteration for save in common_saves(self._look.offers)}

    def _begin(self, state_dict: TensorAwareStateDict, iteration: int) -> str:
        """Agrees with all ranks that a save begins, and on its token. Returns why not, the same on all ranks."""
        # What an earlier save removes counts as free only once it is removed.
        BACKGROUND.wait()
        if self._look is None and not self._nodes:
            self._say_what_is_not_loaded(iteration)
        problem = self._make_room(self._kept())
        # An exchange also before the room is measured: until then the other ranks of the node have removed theirs.
        nodes = group.gather_json(self._place()[0])
        if nodes != self._nodes:
            self._nodes = nodes
            self._on_node(self._node_ranks)
            group.gather_json(None)
        own = self._bid(state_dict)
        bids = [Bid(**bid) for bid in group.gather_json(replace(own, refused=problem or own.refused).as_json())]
        verdict: SaveVerdict = decide_save(bids)
        self._token = verdict.token
        self._size = len(bids)
        self._copies_fit = verdict.copies_fit
        self._replaced = self._token_of(self._ckpt_id(iteration))
        if verdict.refused:
            self._note_failure(verdict.refused)
        return verdict.refused

    def _say_what_is_not_loaded(self, iteration: int) -> None:
        """Says that a first save will remove newer parts, for which the program has never asked."""
        newer = [save.iteration for save in self._saves() if save.iteration > iteration]
        if newer:
            say_on_rank_0(
                f"the program has not looked for the local checkpoint of iteration {max(newer)} (Megatron-LM looks only"
                f" with --load), and its save of iteration {iteration} removes it"
            )

    def _copy_to_host(self, state_dict: TensorAwareStateDict) -> str:
        """Copies the tensors to the host, and waits for that. Returns why it has failed; empty: it has not."""

        def copy() -> None:
            state_dict.copy_tensors_to_cpu(non_blocking=True)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()

        return _problem_of(copy)

    def _finalize(self, save: Save, problem: str, then: list[Callable[[], Any]]) -> None:
        """Agrees with all ranks on what became of an asynchronous save. Collective.

        Args:
            save: which one.
            problem: why it cannot be whole; empty: this rank looks.
            then: the functions of the request, of which this one is the first. After a failure no other is called: the
                program's functions count upon a checkpoint, and the peer's class raises an exception before them.
        """
        if save in self._settled:
            self._settled.remove(save)
        elif not self._settle(save, problem, is_async=True):
            then.clear()

    def _settle(self, save: Save, problem: str, is_async: bool) -> bool:
        """Agrees with all ranks on what became of a save, and removes what is not needed any more. Returns whether it
        is whole on all ranks. Collective."""
        iteration = save.iteration
        with debug_time("finalize_fn", logger):
            self._in_flight = None
            self._late = 0
            if not problem and not self._is_here(save):
                problem = "its part is not there"
            first = _first_problem(problem)
            if first:
                self._note_failure(f"iteration {iteration}: {first}")
                if self._complete == iteration:
                    self._complete = None
                clean = partial(self._cleanup_failed_save, iteration)
            else:
                self._failed_in_a_row = 0
                self._complete = iteration
                self._on_saved(True)
                clean = partial(self._cleanup, iteration)
            if is_async:
                BACKGROUND.start(partial(_quietly, clean))
            else:
                _quietly(clean)
        return not first

    def _is_here(self, save: Save) -> bool:
        """Whether this rank's part of a save is whole."""
        return save in self._saves()

    def _saves(self) -> list[Save]:
        """Returns the saves of which this rank has its part. Does not fail: the other ranks wait for this one."""
        try:
            return [Save(found[0], self._token_of(found)) for found in self._my_ckpt_ids() if found[1] == self.rank]
        except Exception as error:
            say(f"the local checkpoints of rank {self.rank} cannot be listed: {_words(error)}")
            return []

    def _is_read_everywhere(self, save: Save) -> bool:
        """Reads this rank's part of a save. Returns whether all ranks have read theirs. Collective."""
        self._agreed_token = save.token
        problem = ""
        try:
            self._load(self._ckpt_id(save.iteration))
        except Exception as error:
            problem = _words(error)
        first = _first_problem(problem)
        if first:
            say_on_rank_0(f"the local checkpoint of iteration {save.iteration} is not used: {first}")
        return not first

    def _tell(self, found: Save | None) -> None:
        """Tells the launcher where the training goes on, once."""
        if self._look is not None and not self._is_told:
            self._is_told = True
            self._on_look(found, self._look)

    def _note_failure(self, reason: str) -> None:
        """Counts a failed save, and says it. Called on all ranks for the same saves."""
        self.failures += 1
        self._failed_in_a_row += 1
        self._on_saved(False)
        text = f"no local checkpoint was saved: {reason}"
        if self._failed_in_a_row >= MAX_FAILURES:
            text += f". {MAX_FAILURES} in a row were not: no more are saved"
        say_on_rank_0(text)


def _write_in_another_process(manager: BaseCheckpointManager, sent: SentState, ckpt_id: CkptID) -> None:
    """Writes a part. Mostly runs in a process beside the rank, whose end must not depend on it.

    A function of a module, which a persistent worker can be sent.
    """
    problem = _problem_of(lambda: manager._save_fn({ckpt_id: sent.take()}))
    if problem:
        say(f"the local checkpoint of iteration {ckpt_id[0]} of rank {ckpt_id[1]} was not written: {problem}")


def _first_problem(own: str) -> str:
    """Returns the problem of the first rank that has one, with the rank; empty: none has. Collective."""
    for rank, problem in enumerate(group.gather_json(own)):
        if problem:
            return f"rank {rank}: {problem}"
    return ""


def _problem_of(work: Callable[[], object]) -> str:
    """Returns why some work has failed; empty: it has not."""
    try:
        work()
    except Exception as error:
        return _words(error)
    return ""


def _quietly(work: Callable[[], object]) -> None:
    """Does some work that nothing depends on."""
    problem = _problem_of(work)
    if problem:
        say(f"local checkpoints were not cleaned up: {problem}")


def _words(error: Exception) -> str:
    """Returns an error in one line."""
    text = ""
    with suppress(Exception):
        text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"
