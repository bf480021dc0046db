"""Who takes part in a cycle and in which order, from those who came. Pure; knows no time and no store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ft_launcher.nodes.messages import NO_RANK, Arrive


@dataclass(frozen=True)
class Size:
    """How many nodes a cycle may have. `held_back` of them are spares while `minimum` is reached without them.

    With `segment`, nodes of one group take part in multiples of it only.
    """

    minimum: int
    maximum: int
    held_back: int = 0
    segment: int | None = None
    may_grow: bool = True
    may_shrink: bool = True

    def active(self, nodes: int, before: int) -> int:
        """How many of `nodes` take part, `before` having taken part in the last cycle (0: none); 0: too few."""
        count = min(self.maximum, max(self.minimum, nodes - self.held_back))
        if before and not self.may_grow:
            count = min(count, before)
        floor = max(self.minimum, before if before and not self.may_shrink else 0)
        count = min(count, nodes)
        return count if count >= floor else 0


def how_many(came: Collection[Arrive], before: int, size: Size) -> int:
    """How many nodes `choose` takes of these, `before` having taken part in the last cycle; does not sort."""
    count, segment = size.active(len(came), before), size.segment or 1
    if segment > 1:
        blocks = sum(nodes // segment for nodes in Counter(node.group for node in came).values())
        count = min(count // segment, blocks) * segment
    return count if count >= size.minimum else 0


def choose(came: Sequence[Arrive], former: Sequence[str], size: Size) -> list[Arrive]:
    """The members of the next cycle by node rank; empty: too few for one.

    Former members keep their order, so that rank 0 stays where it was; a newcomer takes the place of a lost one; others
    come after. Nodes that insist on a rank have it.

    Args:
        came: who is there, each node once.
        former: members of the last cycle by rank, lost ones included.
        size: how many there may be.
    """
    segment, count = size.segment or 1, how_many(came, len(former), size)
    if segment == 1:
        members = _arrange(came, former, count)
    else:
        members = [node for block in _segments(came, former, segment)[: count // segment] for node in block]
    if any(node.rank != NO_RANK for node in members):
        members.sort(key=lambda node: _first_order(node)[0])
    return members


def _arrange(came: Sequence[Arrive], former: Sequence[str], count: int) -> list[Arrive]:
    there, known = {node.node: node for node in came}, set(former)
    back = set([node for node in former if node in there][:count])
    new = sorted((node for node in came if node.node not in known), key=_first_order)[: count - len(back)]
    waiting = iter(new)
    places = [there[node] if node in back else next(waiting, None) for node in former]
    return [node for node in places if node is not None][:count] + list(waiting)


def _segments(came: Sequence[Arrive], former: Sequence[str], length: int) -> list[list[Arrive]]:
    """Whole segments, those with former members first and in their order."""
    groups: dict[str, list[Arrive]] = defaultdict(list)
    for node in came:
        groups[node.group].append(node)
    rank = {node: index for index, node in enumerate(former)}
    blocks = []
    for members in groups.values():
        ours = {node.node for node in members}
        arranged = _arrange(members, [node for node in former if node in ours], len(members))
        blocks += [arranged[at : at + length] for at in range(0, len(arranged) - length + 1, length)]
    last = len(former)
    return sorted(blocks, key=lambda block: (min(rank.get(node.node, last) for node in block), _first_order(block[0])))


def _first_order(node: Arrive) -> tuple[int, str, str]:
    return (node.rank if node.rank != NO_RANK else 1 << 30, node.order, node.node)
