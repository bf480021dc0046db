"""Decides which node keeps copies of whose states, and what each node fetches before its ranks start. Pure.

The coordinator calls `plan_copies` when it has formed a cycle. It knows where each node's ranks are now, and which
states each node had when it asked for its place (`CopyOffer`): no rank has run since, so nothing has changed.

**Targets.** The states of a node go to `--ft-memory-buddies` other nodes. Nodes of another group go first
(`--ft-node-group`): the nodes of one group may be lost together. Of these the node goes first that was chosen least
often so far, so that all keep about as much, and then the next one by node rank.

For example: nodes 0 and 1 are in one rack, 2 and 3 in another, and each wants one copy. Then 0 sends to 2, 1 to 3, 2 to
0, and 3 to 1.

**Fetching.** The nodes of the cycle go on together from one state, so there is one that they fetch: the newest of as
many ranks as the job has now of which each node's part is somewhere, on the node itself, or on any node of the cycle or
any that waits. A node that has its part in its own folder fetches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ft_launcher.job.coordinator.node_messages import JoinRequest
from rank_monitor.contract.copy_records import CopyFetch, CopyPeer, CopyPlan, HeldState


def plan_copies(
    members: Sequence[JoinRequest],
    waiting: Sequence[JoinRequest],
    first_ranks: Sequence[int],
    set_aside: Mapping[int, int],
) -> dict[str, CopyPlan]:
    """Returns the plan of each node that makes an offer, by its id; empty: no node wants copies.

    Args:
        members: the nodes of the cycle, by node rank.
        waiting: the nodes that wait. They keep no copies, but may have states.
        first_ranks: of each member, the number of its first rank.
        set_aside: cycle -> the step from which on states were bad when it was formed. The nodes of that cycle have
            marked theirs since; what others have, that were away, is as it was before.
    """
    if all(node.copies is None for node in members):
        return {}
    ranks = [list(range(first, first + node.nprocs)) for node, first in zip(members, first_ranks, strict=True)]
    world = sum(node.nprocs for node in members)
    targets = _targets(members)
    fetches = _fetches(members, waiting, ranks, world, set_aside)
    plans = {}
    for at, node in enumerate(members):
        if node.copies is not None:
            receives = [ranks[other] for other in range(len(members)) if at in targets[other]]
            plans[node.node] = CopyPlan(world, [_peer(members[to]) for to in targets[at]], receives, fetches.get(at))
    return plans


def _targets(members: Sequence[JoinRequest]) -> list[list[int]]:
    """Returns to which nodes each node sends its states, by node rank."""
    chosen = [0] * len(members)
    targets: list[list[int]] = []
    for at, node in enumerate(members):
        found: list[int] = []
        if node.copies is not None:
            others = [(at + distance) % len(members) for distance in range(1, len(members))]
            others = [other for other in others if members[other].copies is not None]
            found = _best_first(others, members, node.group, chosen)[: node.copies.buddies]
        for other in found:
            chosen[other] += 1
        targets.append(found)
    return targets


def _best_first(others: Sequence[int], members: Sequence[JoinRequest], group: str, chosen: Sequence[int]) -> list[int]:
    """Returns nodes for the copies of a node, the best one first.

    Args:
        others: their node ranks, from that of the node on.
        members: as in `plan_copies`.
        group: of the node.
        chosen: how often each node was chosen so far.
    """

    def rank(other: int) -> tuple[bool, int]:
        return bool(group) and members[other].group == group, chosen[other]

    return sorted(others, key=rank)  # keeps the order of those that are equal


def _fetches(
    members: Sequence[JoinRequest],
    waiting: Sequence[JoinRequest],
    ranks: Sequence[list[int]],
    world: int,
    set_aside: Mapping[int, int],
) -> Mapping[int, CopyFetch]:
    """Returns what each node fetches, by node rank."""
    holders: dict[tuple[int, str, tuple[int, ...]], list[tuple[JoinRequest, HeldState]]] = {}
    for node in [*members, *waiting]:
        below = min((step for cycle, step in set_aside.items() if cycle > node.cycle), default=math.inf)
        for state in node.copies.states if node.copies is not None else ():
            if state.world == world and state.step < below:
                holders.setdefault((state.step, state.series, tuple(state.ranks)), []).append((node, state))
    generations = sorted({(step, series) for step, series, _ in holders}, reverse=True)
    for step, series in generations:
        if all((step, series, tuple(of_node)) in holders for of_node in ranks):
            break
    else:
        return {}
    fetches = {}
    for at, (member, of_node) in enumerate(zip(members, ranks, strict=True)):
        there = holders[step, series, tuple(of_node)]
        of_self = [state for node, state in there if node.node == member.node]
        if member.copies is None or any(state.is_own for state in of_self):
            continue
        # A node's own folder first: nothing else reads it now.
        there = sorted(there, key=lambda held: not held[1].is_own)
        peers = [_peer(node) for node, _ in there if node.node != member.node]
        fetches[at] = CopyFetch(step, world, series, of_node, peers)
    return fetches


def _peer(node: JoinRequest) -> CopyPeer:
    assert node.copies is not None
    return CopyPeer(node.name, node.address, node.copies.port)
