"""The graph of waits in a hang: who waits for whom, by the collectives that each rank has entered and finished. Pure.

`collective.py` calls `waits_of` and decides by the result. The functions here return edges, circles and the words for
both, and name no culprit. The facts are those of torch's flight recorder:

- Each rank counts the collectives of each of its groups. All members run the same collectives in the same order, so
  collective n of a group is the same call on all members.
- A rank that has entered more collectives of a group than it has finished waits in the first unfinished one. It waits
  for the members that have not entered that collective.
- A rank in a send waits for the receive of its peer, and a rank in a receive for the send.

Example with one group: ranks 0 and 1 have entered 4 collectives and finished 3, rank 2 has entered and finished 3. Then
the graph has the edges 0 -> 2 and 1 -> 2, and rank 2, which waits for nobody, holds up the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ft_launcher.decide.attribution.rank_view import RankView, group_text
from ft_launcher.decide.attribution.scene import Activity

_WITH_ROOT = {"broadcast", "reduce", "gather", "scatter", "_broadcast_oop", "_reduce_oop"}
"""Collectives with a root, which a rank may finish before the others have entered them: the root of a broadcast only
sends. A finished entry of another rank therefore does not prove that such a collective is over."""


@dataclass(frozen=True)
class Wait:
    """An edge of the graph: one rank waits in a collective, or in a send or a receive.

    Attributes:
        rank: the global rank that waits.
        group: torch's name of the group; for a message a name of its own, so that messages are not joined.
        number: which collective of the group, from 1; for a message the rank at its other end.
        missing: the ranks that it waits for: members that have not entered the collective.
        is_complete: all members of the group are known. Only then an empty `missing` means that all have entered.
        message: `send` or `receive`; empty for a collective.
    """

    rank: int
    group: str
    number: int
    missing: tuple[int, ...]
    is_complete: bool
    message: str = ""


def waits_of(views: Mapping[int, RankView], all_ranks: bool) -> list[Wait]:
    """Returns the waits of all ranks: the edges of the graph. Ranks that are stopped or have ended wait for nobody.

    A rank whose stack is in the program may wait as well: NCCL's collectives run on the GPU, and the rank waits for
    them in its own code, for instance in `loss.item()`. Its unfinished collective counts as a wait if a member has not
    entered the collective, or if a member on an unknown node may not have. A collective that all members have entered
    usually runs in the background and ends by itself; it counts only where the stack shows a wait.

    Args:
        views: the ranks by global rank.
        all_ranks: these are all ranks of the job.
    """
    members: dict[str, set[int]] = {}
    listed: set[str] = set()
    """Groups whose members the recorder of at least one rank lists. The views of other nodes have no lists."""
    unfinished: set[str] = set()
    """Groups of which at least one rank has finished no collective. A finished collective has had all members in it. So
    each member of any other group has that group in its recorder, and is seen as a member without a list."""
    for view in views.values():
        for name, state in view.groups.items():
            members.setdefault(name, set()).update({view.rank}, view.members.get(name, ()))
            if name in view.members:
                listed.add(name)
            if state.finished == 0:
                unfinished.add(name)
    found = []
    missing: dict[tuple[str, int], tuple[int, ...]] = {}
    """Group and number -> the missing ranks. Computed once for each collective: computed once for each rank, it would
    take seconds in a job of 2,048 ranks."""
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
                    is_complete = name in listed or name not in unfinished
                    found.append(Wait(view.rank, name, number, missing[name, number], is_complete))
        found += [
            Wait(view.rank, f"{message} of rank {view.rank}", peer, (peer,), True, message)
            for message, peer in _messages_without_peer(view, views)
        ]
    return found


def _messages_without_peer(view: RankView, views: Mapping[int, RankView]) -> list[tuple[str, int]]:
    """Returns the sends and receives of a rank that the peer has no counterpart for, each with the peer's rank.

    Empty unless the rank has exactly one peer and no unfinished collective. With something else unfinished, its message
    may stand behind that in the GPU's queue, while the peer has already done its part. And the recorder has one state
    for all messages of a batch, which does not show for which peer the rank waits.
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
    """Returns, for each group by its name, the number of the last collective that at least one rank has finished."""
    found: dict[str, int] = {}
    for view in views:
        for name, state in view.groups.items():
            found[name] = max(found.get(name, 0), state.finished)
    return found


def has_unfinished(view: RankView, finished: Mapping[str, int]) -> bool:
    """Returns whether a rank has entered an operation that is not finished and may still wait for another rank.

    A collective that another rank has finished waits for no rank any more, unless its root may finish it alone
    (`_WITH_ROOT`).

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
    """Returns the ranks of one cycle in the graph of waits, each waiting for the next; empty if there is no cycle.

    Args:
        without: a rank to leave out of the graph, to see whether every cycle needs it; None: no rank.
    """
    # A node of the graph is a rank or a collective: rank -> collective -> missing ranks. Edges from each rank to each
    # missing rank would be a million in a large job.
    graph: dict[int | tuple[str, int], set[int | tuple[str, int]]] = {}
    for wait in waits:
        if wait.rank != without:
            graph.setdefault(wait.rank, set()).add((wait.group, wait.number))
            if (wait.group, wait.number) not in graph:
                graph[wait.group, wait.number] = {rank for rank in wait.missing if rank != without}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib lists each node before the one that depends on it, and repeats the first node at the end. Reversed,
        # each rank waits for the next.
        cycle: list[int | tuple[str, int]] = error.args[1]
        return [node for node in cycle[:0:-1] if isinstance(node, int)]
    return []


def by_collective(waits: Iterable[Wait]) -> dict[tuple[str, int], list[int]]:
    """Returns the ranks that wait in each collective, by group and number. Sends and receives are left out."""
    found: dict[tuple[str, int], list[int]] = {}
    for wait in waits:
        if not wait.message:
            found.setdefault((wait.group, wait.number), []).append(wait.rank)
    return found


def never_entered(wait: Wait, views: Mapping[int, RankView]) -> str:
    """Returns what the missing ranks of a wait did, without the subject: `never entered all_reduce 4 of group dp`."""
    if wait.message == "send":
        return f"never received what rank {wait.rank} sends"
    if wait.message == "receive":
        return f"never sent what rank {wait.rank} is to receive"
    return f"never entered {collective_text(wait, views)}"


def collective_text(wait: Wait, views: Mapping[int, RankView]) -> str:
    """Returns what a rank waits in: operation, number and group of a collective, or the send or the receive."""
    if wait.message == "send":
        return f"a send to rank {wait.number}"
    if wait.message == "receive":
        return f"a receive from rank {wait.number}"
    view = views[wait.rank]
    operation = view.groups[wait.group].operation or "collective"
    return f"{operation} {wait.number} of {group_text(wait.group, view)}"
