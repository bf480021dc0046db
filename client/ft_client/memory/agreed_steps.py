"""Which steps all ranks can put together, by what each of them offers. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rank_monitor.contract.memory_files import Generation, HeldFiles, StateFile


@dataclass(frozen=True)
class SourceFile:
    """A file of a job with another number of ranks, and who can read it.

    Attributes:
        rank: that has written it, by its number then.
        node_ranks: how many ranks its node had then.
        nodes: the present ranks of each node that has it, ascending; the node with the lowest rank first.
    """

    rank: int
    node_ranks: int
    nodes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OtherWorld:
    """What the nodes have of a generation of a job with another number of ranks.

    `files`: ascending by rank; some may be missing.
    """

    step: int
    world: int
    series: str
    files: tuple[SourceFile, ...]

    def name_of(self, file: SourceFile) -> StateFile:
        """Returns the name of one of the files."""
        return StateFile(self.step, file.rank, self.world, file.node_ranks, self.series)


@dataclass(frozen=True)
class Offer:
    """What one rank says in the exchange of `load`. No field has a default: the offer of another release, whose fields
    are others, is then recognised by all ranks.

    Attributes:
        node: tells the rank's node from others; ranks of one node have one folder.
        generations: that are complete in this folder.
        others: whole files in this folder of jobs with another number of ranks.
        newer_than: the step of the checkpoint on disk, as the rank's program says.
        series: of the saves to come. That of rank 0 counts.
        interval: steps between two saves, as the launcher of the rank's node says. That of rank 0 counts.
        refused: why this rank can keep no state; empty: it can.
        reached: the last step that a rank of the node has reported before; 0: none has.
        no_save_until: the step that the training must pass before it saves, by the marks in this folder; 0: there is no
            mark. The largest that any rank says counts: a node that has just joined has no mark.
        set_aside_from: the step from which on states are not used, by the marks in this folder; None: there is no mark.
            Of jobs with another number of ranks the least that any rank says counts, as one node's file may be enough.
    """

    node: str
    generations: Sequence[Generation]
    others: Sequence[HeldFiles]
    newer_than: int
    series: str
    interval: int
    refused: str
    reached: int
    no_save_until: int
    set_aside_from: int | None


@dataclass(frozen=True)
class AgreedSteps:
    """What follows from all offers; the same on all ranks, but for `node_ranks`.

    Attributes:
        candidates: generations that all nodes have, as this rank's node has them, and those of jobs with another number
            of ranks, of which some node has a file. The newest first; of one step that of this job. The first one that
            all ranks can verify is loaded.
        older: steps of such generations that are not newer than the checkpoint on disk.
        left_out: newer than the checkpoint on disk, and complete on a node, but not a candidate: not on all nodes, or
            with its ranks on other nodes; all such where a rank can keep no state. The newest first.
        node_ranks: the ranks of this rank's node, ascending.
        newer_than: the largest that any rank says.
        series: of the saves to come.
        interval: between the saves to come.
        refusing_rank: the first rank that can keep no state. No rank saves or loads then. None: all ranks can.
        refused: why it cannot.
        reached: the last step that a rank of the job has reported before; 0: none has.
        no_save_until: the step that the training must pass before it saves; 0: it saves at once.
    """

    candidates: tuple[Generation | OtherWorld, ...]
    older: tuple[int, ...]
    left_out: tuple[Generation, ...]
    node_ranks: tuple[int, ...]
    newer_than: int
    series: str
    interval: int
    refusing_rank: int | None
    refused: str
    reached: int
    no_save_until: int


def agree(offers: Sequence[Offer], rank: int) -> AgreedSteps:
    """Returns what all ranks can put together. A generation of as many ranks as the job has now counts only if its
    ranks lie on the nodes as they do now. Of one of another number of ranks each file counts, wherever it lies.

    Args:
        offers: by rank.
        rank: of the caller.
    """
    nodes: dict[str, list[int]] = {}
    for other, offer in enumerate(offers):
        nodes.setdefault(offer.node, []).append(other)

    def fitting(offer: Offer) -> list[Generation]:
        """Returns what a rank's node has of this job's ranks as they lie now."""
        here = tuple(nodes[offer.node])
        return [found for found in offer.generations if found.world == len(offers) and found.ranks == here]

    common = {(found.step, found.series) for found in fitting(offers[0])}
    for offer in offers:
        common &= {(found.step, found.series) for found in fitting(offer)}
    others = _other_worlds(offers, nodes)
    refusing_rank: int | None = None
    refused = ""
    for other, offer in enumerate(offers):
        if offer.refused and refusing_rank is None:
            refusing_rank, refused = other, offer.refused
            common, others = set(), []
    newer_than = max(offer.newer_than for offer in offers)
    own = [found for found in fitting(offers[rank]) if (found.step, found.series) in common]
    agreed: list[Generation | OtherWorld] = [*own, *others]
    agreed.sort(key=lambda found: (found.step, found.world == len(offers), found.series), reverse=True)
    common |= {(found.step, found.series) for found in others}
    # Of all ranks: the node of rank 0, which tells the user of these, may be a new one.
    offered = {(found.step, found.series): found for offer in offers for found in offer.generations}
    return AgreedSteps(
        candidates=tuple(found for found in agreed if found.step > newer_than),
        older=tuple(sorted({found.step for found in agreed if found.step <= newer_than}, reverse=True)),
        left_out=tuple(offered[key] for key in sorted(offered.keys() - common, reverse=True) if key[0] > newer_than),
        node_ranks=tuple(nodes[offers[rank].node]),
        newer_than=newer_than,
        series=offers[0].series,
        interval=offers[0].interval,
        refusing_rank=refusing_rank,
        refused=refused,
        reached=max(offer.reached for offer in offers),
        no_save_until=max(offer.no_save_until for offer in offers),
    )


def _other_worlds(offers: Sequence[Offer], nodes: Mapping[str, Sequence[int]]) -> list[OtherWorld]:
    """Returns what the nodes have of jobs with another number of ranks than `offers` are of. `nodes`: ranks by node."""
    marks = [offer.set_aside_from for offer in offers if offer.set_aside_from is not None]
    below = min(marks, default=None)
    holders: dict[tuple[int, int, str], dict[int, dict[int, set[str]]]] = defaultdict(dict)
    for offer in offers:
        for held in offer.others:
            if held.world == len(offers) or (below is not None and held.step >= below):
                continue
            of_rank = holders[held.step, held.world, held.series]
            for rank in held.ranks:
                of_rank.setdefault(rank, {}).setdefault(held.node_ranks, set()).add(offer.node)
    found = []
    for (step, world, series), of_rank in holders.items():
        files = []
        for rank, of_size in sorted(of_rank.items()):
            # One rank of one series has written one name; of two names, which a user may have made, one is taken.
            node_ranks = min(of_size)
            files.append(SourceFile(rank, node_ranks, _by_lowest_rank(of_size[node_ranks], nodes)))
        found.append(OtherWorld(step, world, series, tuple(files)))
    return found


def _by_lowest_rank(names: Collection[str], nodes: Mapping[str, Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of some nodes, the node with the lowest rank first."""
    return tuple(sorted(tuple(nodes[name]) for name in names))
