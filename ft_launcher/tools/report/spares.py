"""Finds the nodes that a job lost, how long it missed them, and what one more spare would have saved. Pure.

`findings.py` calls `find_spares`. Within an attempt a node is lost when it took part in a cycle and not in the next
one, or when the next cycle has fewer nodes. Between two attempts a node is lost when its launcher left no event about
its end while other launchers did.

What the job missed is counted in seconds of ranks (rank-seconds): all ranks count while they wait for a node, and the
ranks of one node count while the job runs without it. A spare saves the first by being there, and the second by taking
the place.

So the cycles of all nodes are put in order (`_Group`), and the time between each and the next is looked at (`_Gap`).

An example, four nodes of 8 ranks: a node is lost, three nodes wait 10 minutes for another one, and a restart usually
takes one minute. All 32 ranks of the next cycle waited 9 minutes too long: a spare would have saved 4.8 rank-hours. For
this it would have waited for the whole job, 8 ranks for as long as the job ran.
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
        by_spare: how many of these places a node took that waited already.
        mtbf_s: time that the job ran, for each loss (seconds); None: there was no loss.
        back_s: mean time until as many nodes ran as before, of losses that no spare made up for; None: not known.
        saved_rank_s: rank-seconds that one more spare would have saved.
        cost_rank_s: rank-seconds that one more spare would have cost.
        idle_rank_s: rank-seconds of the nodes that waited while others ran.
        active: share of the ranks that trained among all that were there while cycles ran; spares lower it.
        ran_s: time that the job ran (seconds), without the time between its attempts.
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
    """A cycle on all nodes.

    Attributes:
        attempt: the attempt that the cycle belongs to.
        members: id -> launch, of the launches that took part.
        began, ended: of the cycle (seconds since 1970).
        nodes, ranks: how many took part, on all nodes.
        node_ranks: most ranks of one node.
    """

    attempt: int
    members: Mapping[int, Launch]
    began: float
    ended: float
    nodes: int
    ranks: int
    node_ranks: int

    @property
    def length_s(self) -> float:
        """How long the cycle ran (seconds)."""
        return max(0.0, self.ended - self.began)


@dataclass(frozen=True)
class _Gap:
    """The time between two cycles.

    Attributes:
        before, after: the two cycles.
        is_loss: a node was lost in it.
        by_spare: a node that waited took the place of the lost one.
    """

    before: _Group
    after: _Group
    is_loss: bool
    by_spare: bool

    @property
    def length_s(self) -> float:
        """How long it was (seconds)."""
        return max(0.0, self.after.began - self.before.ended)


def find_spares(attempts: Mapping[int, Sequence[Launch]]) -> Spares | None:
    """Returns what is known of lost and waiting nodes; None: no cycle of several nodes is known.

    Args:
        attempts: attempt -> its launches.
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
    """Returns the cycles of all attempts, in their order."""
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
            # The cycle still runs, or all its launchers were killed.
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
    """Returns what happened between two cycles."""
    if before.attempt != after.attempt:
        endings = {launch.has_ended for launch in before.members.values()}
        return _Gap(before, after, is_loss=endings == {True, False}, by_spare=False)
    is_loss = after.nodes < before.nodes or not before.members.keys() <= after.members.keys()
    joined = [after.members[new] for new in after.members.keys() - before.members.keys()]
    waited = any(launch.since < before.ended for launch in joined)
    return _Gap(before, after, is_loss, by_spare=is_loss and waited and after.nodes >= before.nodes)


def _missed_s(groups: Sequence[_Group], gaps: Sequence[_Gap]) -> list[float]:
    """Returns for each loss how long there were fewer nodes than before (seconds).

    Left out: losses that a spare made up for at once, and losses after which there were never as many nodes again.
    """
    found = []
    waiting: list[_Gap] = []
    for group, gap in zip(groups[1:], gaps, strict=True):
        if gap.is_loss and not gap.by_spare:
            waiting.append(gap)
        found += [max(0.0, group.began - loss.before.ended) for loss in waiting if group.nodes >= loss.before.nodes]
        waiting = [loss for loss in waiting if group.nodes < loss.before.nodes]
    return found


def _waited_rank_s(gaps: Sequence[_Gap]) -> float:
    """Returns rank-seconds in which all ranks waited for a node, beyond the time of a restart that waits for nobody."""
    waits = [gap for gap in gaps if gap.is_loss and not gap.by_spare]
    others = [gap.length_s for gap in gaps if gap.by_spare or not gap.is_loss]
    if others:
        usual_s = statistics.median(others)
    else:
        usual_s = min((gap.length_s for gap in waits), default=0.0)
    return sum(max(0.0, gap.length_s - usual_s) * gap.after.ranks for gap in waits)


def _ran_without_rank_s(groups: Sequence[_Group], gaps: Sequence[_Gap]) -> float:
    """Returns rank-seconds in which the job ran with fewer nodes than before a loss, counted for the ranks of one node.

    One node, since one more spare can take one place.
    """
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
    """Returns rank-seconds of nodes that were there for a whole cycle and took no part in it."""
    found = 0.0
    for group in groups:
        waited = [launch for launch in attempts[group.attempt] if id(launch) not in group.members]
        waited = [launch for launch in waited if launch.since <= group.began and launch.until >= group.ended]
        found += len(waited) * group.length_s * group.node_ranks
    return found
