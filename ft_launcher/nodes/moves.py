"""Where the ranks of a faulty node go when their job is to be tried on other hardware. Pure; knows no judge.

A node that waits takes its place. Where none does, and only the place of a result is in doubt, it changes places with
another member, of its own group if there is one, so that each of its ranks runs where it did not run before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ft_launcher.nodes.membership import Size, choose, how_many
from ft_launcher.nodes.messages import NO_RANK, Arrive


def can_exchange(came: Collection[Arrive], former: Collection[str]) -> bool:
    """Whether any former member that came could change places with another."""
    alike = len({node.nprocs for node in came}) == 1 and all(node.rank == NO_RANK for node in came)
    return alike and sum(node.node in former for node in came) > 1


def choose_moved(
    came: Sequence[Arrive], former: Sequence[str], size: Size, culprit: str, exchange: bool
) -> list[Arrive]:
    """The members of the next cycle, with other hardware under the ranks of `culprit` if there is some.

    `exchange`: that of another member will do.

    Args:
        came, former, size: as for `choose`.
    """
    others = [node for node in came if node.node != culprit]
    if how_many(others, len(former), size) == how_many(came, len(former), size):
        return choose(others, former, size)
    order, members = list(former), {node.node: node for node in came if node.node in former}
    if exchange and culprit in members and can_exchange(came, former):
        group = members[culprit].group
        partner = min(members.keys() - {culprit}, key=lambda node: (members[node].group != group, order.index(node)))
        here, there = order.index(culprit), order.index(partner)
        order[here], order[there] = partner, culprit
    return choose(came, order, size)
