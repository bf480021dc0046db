"""The machine's part of a checkpoint: how it is written, checked and read back.

`state_machine.py` calls it for `state_dict` and `load_state_dict`; the script puts the dict into its own checkpoint.
Each rank has a part of its own. All of it is JSON, but for the microbatches of the data iterators, which are whatever
the loader made.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from ft_client.rank import rng
from ft_client.rerun.data_iterator import RerunDataIterator
from ft_client.rerun.transitions import IN_DOUBT, RerunState
from ft_client.rerun.unexpected_result import UnexpectedResult

VERSION = 1
"""The version of the form. `read` refuses any other, which a later release may have written."""
_SHARDED = "sharded"
_DISTRIBUTED = "torch_dist"
_MEGATRONS = "megatron.core.dist_checkpointing.mapping"


@dataclass(frozen=True)
class Checkpoint:
    """What one rank keeps over a restart of the job.

    Attributes:
        state: where the step is when the job resumes.
        current_iteration: the number of the last step, or of the step in doubt.
        world_size, rank: who wrote it: a step in doubt can only be resumed by the same rank of as many.
        failure: this rank's unexpected result of the step in doubt.
        rng: the random numbers from before the step; None: the step is a new one.
        largest: the samples of `is_unexpectedly_large`.
        data_iterators: the kept microbatches of each data iterator.
    """

    state: RerunState
    current_iteration: int
    world_size: int
    rank: int
    failure: UnexpectedResult | None = None
    rng: dict[str, Any] | None = None
    largest: dict[str, Any] = field(default_factory=dict)
    data_iterators: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the dict that is saved. Microbatches are not copied."""
        form = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.failure:
            failure = self.failure.to_json()
        else:
            failure = None
        return {"version": VERSION, **form, "state": self.state.value, "failure": failure}


def part_of(form: dict[str, Any], ckpt_format: str, world_size: int, rank: int) -> dict[str, Any]:
    """Returns the dict as it is put into a checkpoint of this format.

    Megatron's distributed checkpoints keep one copy of all plain data: rank 0's. What each rank has of its own must be
    a sharded object there. It comes back from the checkpoint as what it holds.

    Args:
        form: what `Checkpoint.to_dict` returned.
        ckpt_format: the format's name: "torch_dist" for Megatron's distributed checkpoints.
        world_size: how many ranks there are.
        rank: this rank.
    """
    mapping = sys.modules.get(_MEGATRONS)
    if ckpt_format != _DISTRIBUTED or mapping is None:
        return form
    return {_SHARDED: mapping.ShardedObject("rerun_state_machine", form, (world_size,), (rank,))}


def state_to_save(state: RerunState, iteration: int) -> tuple[RerunState, int]:
    """Returns state and iteration to save.

    A step in doubt is computed again by the job that loads the checkpoint. Any other unfinished step is a new step
    there, so the iteration before it is saved.
    """
    if state in IN_DOUBT:
        return RerunState.WILL_RERUN_FROM_CHECKPOINT, iteration
    if state is RerunState.NOT_RUNNING_YET:
        return state, iteration
    return RerunState.NOT_RUNNING_YET, iteration - 1


def as_new_step(loaded: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with the step in doubt as a new step, for a machine that does not judge it."""
    iteration = loaded.current_iteration - 1
    return replace(loaded, state=RerunState.NOT_RUNNING_YET, current_iteration=iteration, failure=None)


def read(state_dict: Any, world_size: int, rank: int) -> Checkpoint:
    """Returns the checkpoint in `state_dict`.

    Raises:
        ValueError: naming `state_dict`: of another form, of another world size, or in doubt of another rank's step.
    """
    if isinstance(state_dict, dict) and _SHARDED in state_dict:
        state_dict = state_dict[_SHARDED]
    if not isinstance(state_dict, dict) or state_dict.get("version") != VERSION:
        raise ValueError(f"state_dict={state_dict!r:.100} was not written by RerunStateMachine.state_dict()")
    try:
        form = {name: state_dict[name] for name in Checkpoint.__dataclass_fields__}
        if form["failure"]:
            failure = UnexpectedResult.from_json(form["failure"])
        else:
            failure = None
        found = Checkpoint(**(form | {"state": RerunState(form["state"]), "failure": failure}))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state_dict: {error!r} in what RerunStateMachine.state_dict() wrote") from error
    if found.world_size != world_size:
        problem = f"state_dict: saved by a world_size of {found.world_size}, this job has {world_size}"
        raise ValueError(f"{problem}: the rerun state cannot be resumed")
    if found.state in IN_DOUBT and found.rank != rank:
        raise ValueError(f"state_dict: saved by rank {found.rank}, this is rank {rank}: each rank loads its own")
    return found


def resume(loaded: Checkpoint | None, iterators: list[RerunDataIterator[Any]]) -> None:
    """Restores data and random numbers of `loaded`, so that an unfinished step begins as it did before.

    Raises:
        ValueError: naming `data_iterator`: as many iterators as the checkpoint was saved with are needed.
    """
    if loaded is None:
        return
    held = [state for state in loaded.data_iterators if state["saved_microbatches"]]
    if held and len(iterators) != len(loaded.data_iterators):
        needed = len(loaded.data_iterators)
        raise ValueError(f"data_iterator: {len(iterators)} iterators, the checkpoint holds the data of {needed}")
    if held:
        for iterator, state in zip(iterators, loaded.data_iterators, strict=True):
            iterator.load_state_dict(state)
            iterator.rewind()
    if loaded.rng is not None:
        rng.restore(rng.from_json(loaded.rng))
