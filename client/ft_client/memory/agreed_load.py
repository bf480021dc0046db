"""Finds the newest step that the whole job can put together, and gives it back to the objects.

One exchange over the process group says which steps each node has. Two votes for each candidate follow: whether all
ranks have verified their files of it, before which no rank changes an object, and whether all objects have taken it.
`exchange` and `restore` are collective: all ranks call them, in the same order, and none leaves one early, whatever
fails on it. Where a vote says no, a third exchange tells all ranks the reasons. A generation of a job with another
number of ranks is read by `reshard_load.py`, which has votes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_client.memory import kept_state, progress, reshard_load
from ft_client.memory.agreed_steps import AgreedSteps, Offer, OtherWorld, agree
from ft_client.memory.kept_state import LoadedState
from ft_client.memory.node_folder import names_in, node_of
from ft_client.memory.safetensors_layout import DamagedFile
from ft_client.memory.state_reader import StateReader
from ft_client.memory.tensor_parts import OtherState
from ft_client.rank.agreement import group
from rank_monitor.contract import memory_files
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.memory_files import AUTO, Generation, MemoryFiles, StateFile
from rank_monitor.contract.wire.json_record import from_json, to_json
from rank_monitor.contract.wire.messages import MAX_REASON, StateRefused


@dataclass(frozen=True)
class Restored:
    """What `restore` has done; the same on all ranks.

    Attributes:
        generation: what the objects were set to; None: there was none.
        refused: what was tried before, the newest first: each rank that could not use it, and why.
        anew: names of the objects that were not set, as each rank of a job with another number of ranks had its own.
    """

    generation: Generation | OtherWorld | None
    refused: tuple[StateRefused, ...]
    anew: tuple[str, ...] = ()


class NotRestored(RuntimeError):
    """Objects have refused every state that all ranks could read, and some of them were changed. The same on all
    ranks. `refused`: as in `Restored`."""

    def __init__(self, text: str, refused: Sequence[StateRefused]) -> None:
        super().__init__(text)
        self.refused = tuple(refused)


def exchange(settings: MemoryFiles, newer_than: int, refused: str) -> AgreedSteps:
    """Returns the steps that all nodes have, and what holds for all ranks in the saves to come. Collective.

    Args:
        settings: what the launcher says.
        newer_than: the step of the checkpoint on disk.
        refused: why this rank can keep no state; empty: it can. It takes part all the same, as others wait for it.
    """
    # Where the folder is gone, it offers nothing.
    names = names_in(settings.folder)
    generations = memory_files.complete_generations(names)
    others = [held for held in memory_files.held_files(names) if held.world != group.size()]
    node = node_of(settings.folder, group.rank())
    reached = progress.last_step(settings.folder)
    until = memory_files.no_save_until(names)
    series = os.urandom(4).hex()
    set_aside = memory_files.set_aside_from(names)
    offer = Offer(node, generations, others, newer_than, series, settings.interval, refused, reached, until, set_aside)
    values = group.gather_json(to_json(offer))
    return agree([_offer(value, rank) for rank, value in enumerate(values)], group.rank())


def _offer(value: Any, rank: int) -> Offer:
    """Returns the offer of a rank as it was sent."""
    try:
        return from_json(Offer, value)
    except ProtocolError:
        return Offer(f"rank {rank}", [], [], 0, "", AUTO, "it has another release of ft_client", 0, 0, None)


def restore(
    folder: str,
    agreed: AgreedSteps,
    objects: Mapping[str, Any],
    safe_types: Sequence[Any],
    say: Callable[[str], None],
) -> Restored:
    """Sets all objects to the newest candidate that every rank can read, and returns it; if there is none, no object
    was changed. Collective.

    Where an object refuses a state on some rank, all ranks take the next candidate: each object is set as a whole, so
    nothing of the refused one is left.

    Args:
        folder: of this node.
        agreed: what `exchange` has found.
        objects: name -> what has `load_state_dict`.
        safe_types: as for `MemoryCheckpoint`.
        say: is called with a line about each candidate that is not used, where this rank has a reason, or is rank 0.

    Raises:
        NotRestored: an object has refused a state, and there is no older one.
    """
    is_changed = False
    refused: list[StateRefused] = []
    for generation in agreed.candidates:
        at = f"step {generation.step} in memory is not used"
        anew: tuple[str, ...] = ()
        if is_changed and isinstance(generation, OtherWorld):
            # What begins anew would have the state of the generation that was refused.
            continue
        if isinstance(generation, OtherWorld):
            read = reshard_load.read(folder, generation, objects, safe_types)
            state, problem, anew = read.state, read.problem, read.anew
        else:
            state, problem = _read_or_problem(folder, generation, objects, safe_types)
        if not _all(state is not None):
            _say_reason(say, at, problem, "another rank cannot read its file")
            refused += _reasons(generation.step, problem)
            continue
        assert state is not None
        is_changed = True
        problem = _give_back(objects, state)
        if _all(not problem):
            return Restored(generation, tuple(refused), anew)
        _say_reason(say, at, problem, "an object of another rank does not take it")
        refused += _reasons(generation.step, problem)
    if is_changed:
        raise NotRestored(
            "no state in memory could be given back to all objects, some of which were changed. "
            "The next start begins without state in memory",
            refused,
        )
    return Restored(None, tuple(refused))


def _reasons(step: int, own: str) -> list[StateRefused]:
    """Returns which ranks could not use a generation, and why; the same on all ranks. Collective.

    `own`: why this rank could not; empty: it could.
    """
    reasons = group.gather_json(own[:MAX_REASON])
    return [StateRefused(step, rank, str(reason)) for rank, reason in enumerate(reasons) if reason]


def _say_reason(say: Callable[[str], None], what: str, own: str, of_others: str) -> None:
    """Says why something is not so: on each rank that has a reason of its own, and on rank 0."""
    if own:
        say(f"{what}: {own}")
    elif group.rank() == 0:
        say(f"{what}: {of_others}")


def _all(is_good: bool) -> bool:
    """Returns whether all ranks say yes. Collective."""
    return bool(group.min_over_ranks([float(is_good)])[0])


def _read_or_problem(
    folder: str, generation: Generation, objects: Mapping[str, Any], safe_types: Sequence[Any]
) -> tuple[LoadedState | None, str]:
    """Returns the state of this rank in a generation, or None and why it cannot be read."""
    try:
        return _read(folder, generation, objects, safe_types), ""
    except (DamagedFile, OtherState, OSError) as problem:
        return None, str(problem)
    except Exception as problem:  # of the user's `state_dict`; the other ranks wait for this one's vote
        return None, f"{type(problem).__name__}: {problem}"


def _give_back(objects: Mapping[str, Any], state: LoadedState) -> str:
    """Sets all objects to a state. Returns why one of them does not take it; empty: all have."""
    try:
        kept_state.give_back(objects, state)
    except Exception as problem:  # of the user's `load_state_dict`, or no memory of the device is left
        return f"{type(problem).__name__}: {problem}"
    return ""


def _read(folder: str, generation: Generation, objects: Mapping[str, Any], safe_types: Sequence[Any]) -> LoadedState:
    """Returns the state of this rank in a generation. Raises DamagedFile, OtherState or OSError.

    What this rank's own file does not have, the node's first rank has written for all.
    """
    own = _reader(folder, generation, group.rank(), safe_types)
    first = own
    if any(name not in own.plain["objects"] for name in objects):
        first = _reader(folder, generation, generation.ranks[0], safe_types)
    sources = {}
    for name in objects:
        source = own
        if name not in own.plain["objects"]:
            source = first
        sources[name] = (source.plain, source.tensors)
    return kept_state.make_again(objects, sources, own.plain, safe_types)


def _reader(folder: str, generation: Generation, rank: int, safe_types: Sequence[Any]) -> StateReader:
    """Returns the verified file of a rank of this node. Raises DamagedFile, OtherState or OSError."""
    file = StateFile(generation.step, rank, generation.world, len(generation.ranks), generation.series)
    try:
        return StateReader(Path(folder), file, safe_types)
    except (DamagedFile, OtherState) as problem:
        raise type(problem)(f"{file.name}: {problem}") from None
