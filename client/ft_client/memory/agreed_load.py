"""Finds the newest step that the whole job can put together, and reads it.

One exchange over the process group says which steps each node has, and one vote for each candidate says whether all
ranks have verified their files of it. No rank changes an object before that vote. All functions here are collective:
all ranks call them, in the same order, and none leaves one early, whatever fails on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_client.memory import kept_state
from ft_client.memory.agreed_steps import AgreedSteps, Offer, agree
from ft_client.memory.kept_state import LoadedState
from ft_client.memory.node_folder import names_in, node_of
from ft_client.memory.safetensors_layout import DamagedFile
from ft_client.memory.state_reader import StateReader
from ft_client.memory.tensor_parts import OtherState
from ft_client.rank.agreement import group
from rank_monitor.contract import memory_files
from rank_monitor.contract.memory_files import Generation, StateFile
from rank_monitor.contract.wire.json_record import from_json, to_json


def exchange(folder: str, newer_than: int) -> AgreedSteps:
    """Returns the steps that all nodes have, and the new series. Collective."""
    # The other ranks wait for this one: where the folder is gone it offers nothing.
    generations = memory_files.complete_generations(names_in(folder))
    offer = Offer(node_of(folder, group.rank()), generations, newer_than, os.urandom(4).hex())
    offers = [from_json(Offer, value) for value in group.gather_json(to_json(offer))]
    return agree(offers, group.rank())


@dataclass(frozen=True)
class FoundState:
    """The generation that all ranks have verified, and the state of this rank in it."""

    generation: Generation
    state: LoadedState


def find(
    folder: str,
    agreed: AgreedSteps,
    objects: Mapping[str, Any],
    replicated: frozenset[str],
    safe_types: Sequence[type],
    say: Callable[[str], None],
) -> FoundState | None:
    """Returns the state of the newest candidate that every rank can read; None: there is none. Collective.

    Args:
        folder: of this node.
        agreed: what `exchange` has found.
        objects: name -> what has `load_state_dict`. Their states are not changed.
        replicated: the names of the objects whose tensors the node's first rank writes.
        safe_types: as for `MemoryCheckpoint`.
        say: is called with a line about each candidate that this rank cannot read.
    """
    for generation in agreed.candidates:
        state = None
        try:
            state = _read(folder, generation, objects, replicated, safe_types)
        except (DamagedFile, OtherState, OSError) as problem:
            say(f"step {generation.step} in memory is not used: {problem}")
        except Exception as problem:  # of the user's `state_dict`; the other ranks wait for this one's vote
            say(f"step {generation.step} in memory is not used: {type(problem).__name__}: {problem}")
        is_read = float(state is not None)
        if group.min_over_ranks([is_read])[0] and state is not None:
            return FoundState(generation, state)
        if is_read:
            say(f"step {generation.step} in memory is not used: another rank cannot read its file")
    return None


def _read(
    folder: str,
    generation: Generation,
    objects: Mapping[str, Any],
    replicated: frozenset[str],
    safe_types: Sequence[type],
) -> LoadedState:
    """Returns the state of this rank in a generation. Raises DamagedFile, OtherState or OSError."""
    rank = group.rank()
    readers = {}
    ranks = {rank}
    if replicated:
        ranks.add(generation.ranks[0])
    for source in ranks:
        file = StateFile(generation.step, source, generation.world, len(generation.ranks), generation.series)
        try:
            readers[source] = StateReader(Path(folder), file, safe_types)
        except (DamagedFile, OtherState) as problem:
            raise type(problem)(f"{file.name}: {problem}") from None
    sources = {}
    for name in objects:
        source = rank
        if name in replicated:
            source = generation.ranks[0]
        sources[name] = (readers[source].plain, readers[source].tensors)
    return kept_state.make_again(objects, sources, readers[rank].plain, safe_types)
