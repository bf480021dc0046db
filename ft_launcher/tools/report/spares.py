"""Nodes that a job lost, for how long it missed them, and what one more spare would have saved. Pure.

Within an attempt a node is lost when it took part in a cycle and not in the next, or when the next has fewer nodes;
at the end of an attempt that another follows, when its launcher left no word of its end while others did. What the job
missed is counted in seconds of ranks: of all ranks while they waited for a node, of one node's while they ran without.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft_launcher.tools.report.collection import Launch


@dataclass(frozen=True)
class Spares:
    """What is known of nodes that were lost, and of nodes that waited.

    Attributes:
        losses: how often a node was lost.
        by_spare: how many of these places were taken by a node that waited already.
        mtbf_s: time that the job ran, for each loss; None: there was none.
        back_s: mean time until as many nodes ran as before, of the losses that no spare made up for; None: unknown.
        saved_rank_s: seconds of ranks that one more spare would have saved.
        cost_rank_s: seconds of ranks that it would have cost.
        idle_rank_s: seconds of ranks of the nodes that waited while others ran.
        active: share of the ranks that trained among all that were there while cycles ran: spares lower it.
        ran_s: time that the job ran, without that between its attempts.
    """

    losses: int
    by_spare: int
    mtbf_s: float | None
    back_s: float | None
    saved_rank_s: float
    cost_rank_s: float
    idle_rank_s: float
    active: float
    ran_s: float


@dataclass(frozen=True)
class _Group:
    """A cycle on all nodes. `members`: the launches that took part; `node_ranks`: ranks of one node, at most."""

    attempt: int
    members: Mapping[int, Launch]
    began: float
    ended: float
    nodes: int
    ranks: int
    node_ranks: int

    @property
    def length_s(self) -> float:
        return max(0.0, self.ended - self.began)


@dataclass(frozen=True)
class _Gap:
    """The time between two cycles. `is_loss`: a node was lost in it; `by_spare`: one that waited took its place."""

    before: _Group
    after: _Group
    is_loss: bool
    by_spare: bool

    @property
    def length_s(self) -> float:
        return max(0.0, self.after.began - self.before.ended)


def find_spares(attempts: Mapping[int, Sequence[Launch]]) -> Spares | None:
    """Returns what is known of lost and waiting nodes; None: no cycle of several nodes is known.

    Args:
        attempts: the launches of each, by its number.
    """
    groups = _groups(attempts)
    if max((group.nodes for group in groups), default=0) < 2:
        return None
    gaps = [_gap(before, after) for before, after in itertools.pairwise(groups)]
    losses = [gap for gap in gaps if gap.is_loss]
    ran_s = sum(
        max(launch.until for launch in launches) - min(launch.since for launch in launches)
        for launches in attempts.values()
    )
    trained_rank_s = sum(group.ranks * group.length_s for group in groups)
    idle_rank_s = _idle_rank_s(groups, attempts)
    mtbf_s = back_s = None
    if losses:
        mtbf_s = ran_s / len(losses)
    missed = _missed_s(groups, gaps)
    if missed:
        back_s = statistics.fmean(missed)
    active = 1.0
    if trained_rank_s > 0:
        active = trained_rank_s / (trained_rank_s + idle_rank_s)
    return Spares(
        losses=len(losses),
        by_spare=sum(gap.by_spare for gap in losses),
        mtbf_s=mtbf_s,
        back_s=back_s,
        saved_rank_s=_waited_rank_s(gaps) + _ran_without_rank_s(groups, gaps),
        cost_rank_s=ran_s * max(group.node_ranks for group in groups),
        idle_rank_s=idle_rank_s,
        active=active,
        ran_s=ran_s,
    )


def _groups(attempts: Mapping[int, Sequence[Launch]]) -> list[_Group]:
    """The cycles in their order."""
    members: dict[tuple[int, int], dict[int, Launch]] = {}
    for attempt, launches in attempts.items():
        for launch in launches:
            for cycle in launch.cycles:
                members.setdefault((attempt, cycle), {})[id(launch)] = launch
    found = []
    for (attempt, number), of_cycle in sorted(members.items(), key=lambda item: item[0]):
        cycles = [launch.cycles[number] for launch in of_cycle.values()]
        ended = [cycle.ended for cycle in cycles if cycle.ended is not None]
        if not ended:
            # It runs, or all its launchers were killed.
            ended = [max(launch.until for launch in of_cycle.values())]
        group = _Group(
            attempt=attempt,
            members=of_cycle,
            began=min(cycle.began for cycle in cycles),
            ended=max(ended),
            nodes=max(len(cycles), *(cycle.nodes for cycle in cycles)),
            ranks=sum(cycle.ranks for cycle in cycles),
            node_ranks=max(cycle.ranks for cycle in cycles),
        )
        found.append(group)
    return found


def _gap(before: _Group, after: _Group) -> _Gap:
    if before.attempt != after.attempt:
        endings = {launch.has_ended for launch in before.members.values()}
        return _Gap(before, after, is_loss=endings == {True, False}, by_spare=False)
    is_loss = after.nodes < before.nodes or not before.members.keys() <= after.members.keys()
    joined = [after.members[new] for new in after.members.keys() - before.members.keys()]
    waited = any(launch.since < before.ended for launch in joined)
    return _Gap(before, after, is_loss, by_spare=is_loss and waited and after.nodes >= before.nodes)


def _missed_s(groups: Sequence[_Group], gaps: Sequence[_Gap]) -> list[float]:
    """For how long there were fewer nodes than before each loss, without those that no node or a spare made up for."""
    found = []
    waiting: list[_Gap] = []
    for group, gap in zip(groups[1:], gaps, strict=True):
        if gap.is_loss and not gap.by_spare:
            waiting.append(gap)
        found += [max(0.0, group.began - loss.before.ended) for loss in waiting if group.nodes >= loss.before.nodes]
        waiting = [loss for loss in waiting if group.nodes < loss.before.nodes]
    return found


def _waited_rank_s(gaps: Sequence[_Gap]) -> float:
    """Seconds in which all ranks waited for a node, beyond what a restart takes that waits for none."""
    waits = [gap for gap in gaps if gap.is_loss and not gap.by_spare]
    others = [gap.length_s for gap in gaps if gap.by_spare or not gap.is_loss]
    if others:
        usual_s = statistics.median(others)
    else:
        usual_s = min((gap.length_s for gap in waits), default=0.0)
    return sum(max(0.0, gap.length_s - usual_s) * gap.after.ranks for gap in waits)


def _ran_without_rank_s(groups: Sequence[_Group], gaps: Sequence[_Gap]) -> float:
    """Seconds in which a job ran with fewer nodes than before a loss, for the ranks of one node: of one spare."""
    found = 0.0
    full = 0
    for group, gap in zip(groups[1:], gaps, strict=True):
        if gap.is_loss:
            full = max(full, gap.before.nodes)
        if group.nodes >= full:
            full = 0
        else:
            found += group.length_s * group.node_ranks
    return found


def _idle_rank_s(groups: Sequence[_Group], attempts: Mapping[int, Sequence[Launch]]) -> float:
    """Seconds in which nodes were there and took no part, for the ranks that they have room for."""
    found = 0.0
    for group in groups:
        waited = [launch for launch in attempts[group.attempt] if id(launch) not in group.members]
        waited = [launch for launch in waited if launch.since <= group.began and launch.until >= group.ended]
        found += len(waited) * group.length_s * group.node_ranks
    return found
