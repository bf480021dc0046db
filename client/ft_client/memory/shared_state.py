"""Which objects of a job with another number of ranks count for every rank of this one. Pure.

Each file says of each of its objects what tells the object's state from others: `REPLICATED`, where the ranks have
compared it when they saved it, else a checksum of all that is no DTensor. A state counts for new ranks only if all old
ranks had the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ft_client.memory.shard_ranges import CannotReshard

REPLICATED = "replicated"


@dataclass(frozen=True)
class SharedObjects:
    """The same on all ranks.

    Attributes:
        reference: the lowest old rank whose file has all that is taken.
        taken: names of the objects that get a state.
        anew: names of those that begin anew.
    """

    reference: int
    taken: tuple[str, ...]
    anew: tuple[str, ...]


def shared_objects(
    told: Mapping[int, Mapping[str, str]],
    names: Collection[str],
    per_rank: Collection[str],
    may_differ: Collection[str],
) -> SharedObjects:
    """Returns which objects get a state.

    Args:
        told: old rank -> name of each object in its file -> what tells its state from others.
        names: of all objects of this job.
        per_rank: names of those that are never taken from another rank, such as loaders.
        may_differ: names of those that begin anew where the old ranks had different states of them.

    Raises:
        CannotReshard: an object that must be the same on all ranks was not, or is in no file that is there.
    """
    taken, anew = [], []
    for name in names:
        states = {of_rank[name] for of_rank in told.values() if name in of_rank}
        if name in per_rank:
            anew.append(name)
        elif not states:
            raise CannotReshard(f"{name} is in no file that is left")
        elif len(states) == 1:
            taken.append(name)
        elif name in may_differ:
            anew.append(name)
        else:
            raise CannotReshard(f"{name} has values that are no DTensor, and they were not the same on all ranks")
    complete = [rank for rank, of_rank in sorted(told.items()) if set(taken) <= set(of_rank)]
    if not taken or not complete:
        raise CannotReshard(f"no file that is left has all of: {', '.join(taken) or 'no object'}")
    return SharedObjects(complete[0], tuple(taken), tuple(anew))
