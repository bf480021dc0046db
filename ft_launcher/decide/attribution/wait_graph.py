"""Who waits for whom, by the collectives that each rank has entered and finished. Pure.

The numbers are those of torch's flight recorder: each rank counts the collectives of each of its groups, so the n-th of
a group is one collective for all its members. A rank waits in a group if it entered a collective that it has not
finished; it waits for the members that have not entered it. A send waits for its receive, and a receive for its send.
These waits form a graph over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ft_launcher.decide.attribution.rank_view import RankView, group_text
from ft_launcher.decide.attribution.scene import Activity

_WITH_ROOT = {"broadcast", "reduce", "gather", "scatter", "_broadcast_oop", "_reduce_oop"}
"""Collectives that a rank may finish before the others have entered them."""


@dataclass(frozen=True)
class Wait:
    """One rank waits in one collective of one group for the ranks `missing`, which have not entered it.

    `is_complete`: all members of the group are known, so that without a missing rank all of them have entered it.
    `message`: it is a "send" or a "receive" and no collective; `number` is the rank at its other end then.
    """

    rank: int
    group: str
    number: int
    missing: tuple[int, ...]
    is_complete: bool
    message: str = ""


def waits_of(views: Mapping[int, RankView], all_ranks: bool) -> list[Wait]:
    """Returns what each rank waits in.

    A rank whose stack is in the program may wait, too: NCCL's collectives run on the GPU, and it waits for them in
    `loss.item()`. So its unfinished collectives count if a member has not entered them, or if one on another node may
    not have. A collective that all have entered runs in the background, and ends by itself.
    """
    members: dict[str, set[int]] = {}
    complete: dict[str, bool] = {}
    for view in views.values():
        for name, state in view.groups.items():
            members.setdefault(name, set()).update({view.rank}, view.members.get(name, ()))
            # A collective that its ranks have finished had all members in it, so each of them names the group.
            complete[name] = name in view.members or (complete.get(name, True) and state.finished > 0)
    found = []
    missing: dict[tuple[str, int], tuple[int, ...]] = {}
    """Looked for once for all ranks of a collective: with 2,048 ranks it would take seconds for each of them."""
    for view in views.values():
        if view.ended or view.scene.activity is Activity.STOPPED:
            continue
        for name, state in view.groups.items():
            number = state.waits_in
            if number is not None:
                if (name, number) not in missing:
                    late = [rank for rank in sorted(members[name]) if _entered(views.get(rank), name) < number]
                    missing[name, number] = tuple(late)
                if view.is_waiting or missing[name, number] or not all_ranks:
                    found.append(Wait(view.rank, name, number, missing[name, number], complete[name]))
        found += [
            Wait(view.rank, f"{message} of rank {view.rank}", peer, (peer,), True, message)
            for message, peer in _messages_without_peer(view, views)
        ]
    return found


def _messages_without_peer(view: RankView, views: Mapping[int, RankView]) -> list[tuple[str, int]]:
    """Returns the sends and receives of a rank for which the other rank has none, and that rank.

    None where it has entered anything else that is not finished: its part may stand behind that in its queue, while the
    other rank has done its own. The parts of a batch have one state, whichever of its peers it waits for.
    """
    found: list[tuple[str, int]] = []
    others = (view.sends or frozenset()) | (view.receives or frozenset())
    if len(others) != 1 or any(state.waits_in is not None for state in view.groups.values()):
        return found
    for peer in sorted(view.sends or ()):
        receives = views[peer].receives if peer in views else frozenset()
        if receives is not None and view.rank not in receives:
            found.append(("send", peer))
    for peer in sorted(view.receives or ()):
        sends = views[peer].sends if peer in views else frozenset()
        if sends is not None and view.rank not in sends:
            found.append(("receive", peer))
    return found


def last_finished(views: Iterable[RankView]) -> dict[str, int]:
    """Returns the number of the last collective of each group that any rank has finished."""
    found: dict[str, int] = {}
    for view in views:
        for name, state in view.groups.items():
            found[name] = max(found.get(name, 0), state.finished)
    return found


def has_unfinished(view: RankView, finished: Mapping[str, int]) -> bool:
    """Returns whether a rank has entered an operation that is not finished, and that may still wait for another rank.

    One that another rank has finished waits for none, unless it is one that its root may finish alone.

    Args:
        finished: `last_finished` of all ranks.
    """
    if view.sends or view.receives or None in (view.sends, view.receives):
        return True
    for name, state in view.groups.items():
        number = state.waits_in
        if number is not None and (number > finished[name] or state.operation in _WITH_ROOT):
            return True
    return False


def _entered(view: RankView | None, group: str) -> int:
    if view is None or group not in view.groups:
        return 0
    return view.groups[group].entered


def cycle_of(waits: Sequence[Wait], without: int | None) -> list[int]:
    """Returns the ranks of a cycle in the graph of waits, each waiting for the next; empty if there is none."""
    # Through a node for each collective: from each rank to each that it waits for it would be a million edges.
    graph: dict[int | tuple[str, int], set[int | tuple[str, int]]] = {}
    for wait in waits:
        if wait.rank != without:
            graph.setdefault(wait.rank, set()).add((wait.group, wait.number))
            if (wait.group, wait.number) not in graph:
                graph[wait.group, wait.number] = {rank for rank in wait.missing if rank != without}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # Each is a predecessor of the next, which is what waits for it; the first stands at the end again.
        cycle: list[int | tuple[str, int]] = error.args[1]
        return [node for node in cycle[:0:-1] if isinstance(node, int)]
    return []


def by_collective(waits: Iterable[Wait]) -> dict[tuple[str, int], list[int]]:
    """Returns the ranks that wait in each collective, by group and number; without those in a send or a receive."""
    found: dict[tuple[str, int], list[int]] = {}
    for wait in waits:
        if not wait.message:
            found.setdefault((wait.group, wait.number), []).append(wait.rank)
    return found


def never_entered(wait: Wait, views: Mapping[int, RankView]) -> str:
    """Returns what those did for whom a rank waits, without the subject."""
    if wait.message == "send":
        return f"never received what rank {wait.rank} sends"
    if wait.message == "receive":
        return f"never sent what rank {wait.rank} is to receive"
    return f"never entered {collective_text(wait, views)}"


def collective_text(wait: Wait, views: Mapping[int, RankView]) -> str:
    """Returns the collective in words: its operation, its number, its group; or the send or receive."""
    if wait.message == "send":
        return f"a send to rank {wait.number}"
    if wait.message == "receive":
        return f"a receive from rank {wait.number}"
    view = views[wait.rank]
    operation = view.groups[wait.group].operation or "collective"
    return f"{operation} {wait.number} of {group_text(wait.group, view)}"
