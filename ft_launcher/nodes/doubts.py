"""Nodes that insist on a rank which another node holds, and that one may be dead: let in, refused, or kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ft_launcher.nodes.messages import NO_RANK, Arrive, Over
from ft_launcher.nodes.terms import Reply
from rank_monitor.contract.exit_codes import ExitCode


def holder_of(came: Arrive, others: Iterable[Arrive]) -> Arrive | None:
    """The one among these nodes that has the rank this one insists on."""
    if came.rank == NO_RANK:
        return None
    return next((node for node in others if node.rank == came.rank and node.node != came.node), None)


class Doubts:
    """They wait at most `doubt_s` for the other's loss; with this node, `me`, which surely lives, not at all."""

    def __init__(self, me: str, doubt_s: float) -> None:
        self._me, self._doubt_s = me, doubt_s
        self._since: dict[str, tuple[Arrive, float]] = {}

    def keep(self, came: Arrive, now: float) -> None:
        """One more node, whose rank is held."""
        self._since[came.node] = (came, now)

    def drop(self, node: str) -> None:
        """A node is gone."""
        self._since.pop(node, None)

    def take_all(self) -> dict[str, Arrive]:
        """All of them, which are in doubt no more."""
        taken = {node: came for node, (came, _) in self._since.items()}
        self._since = {}
        return taken

    def deadlines(self) -> list[float]:
        """When each is refused."""
        return [since + self._doubt_s for _, since in self._since.values()]

    def settle(self, others: Iterable[Arrive], now: float) -> tuple[list[Arrive], list[Reply]]:
        """Those whose rank is free now, and the refusals of those whose rank is not, after all.

        Args:
            others: the nodes that are not known to be gone.
        """
        let_in, refused, there = list[Arrive](), list[Reply](), list(others)
        for came, since in list(self._since.values()):
            holder = holder_of(came, there)
            if holder is None:
                let_in.append(came)
                there.append(came)
            elif holder.node == self._me or now >= since + self._doubt_s:
                reason = f"node rank {came.rank} is taken by node {holder.name}; give each node its own --node-rank"
                refused.append(Reply(came.node, came.seq, Over(int(ExitCode.BAD_CONFIG), reason)))
            else:
                continue
            del self._since[came.node]
        return let_in, refused
