"""Which steps all ranks can put together, by what each of them offers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rank_monitor.contract.memory_files import Generation


@dataclass(frozen=True)
class Offer:
    """What one rank says in the exchange of `load`.

    Attributes:
        node: tells the rank's node from others; ranks of one node have one folder.
        generations: that are complete in this folder.
        newer_than: the step of the checkpoint on disk, as the rank's program says.
        series: of the saves to come. That of rank 0 counts.
    """

    node: str
    generations: Sequence[Generation]
    newer_than: int
    series: str


@dataclass(frozen=True)
class AgreedSteps:
    """What follows from all offers; the same on all ranks, but for `node_ranks`.

    Attributes:
        candidates: generations that all nodes have, as this rank's node has them, the newest first. The first one that
            all ranks can verify is loaded.
        older: steps that all nodes have, but which are not newer than the checkpoint on disk.
        left_out: newer than the checkpoint on disk, and on this rank's node, but not on all nodes, or of a job with
            another number of ranks, or with its ranks on other nodes.
        node_ranks: the ranks of this rank's node, ascending.
        newer_than: the largest that any rank says.
        series: of the saves to come.
    """

    candidates: tuple[Generation, ...]
    older: tuple[int, ...]
    left_out: tuple[Generation, ...]
    node_ranks: tuple[int, ...]
    newer_than: int
    series: str


def agree(offers: Sequence[Offer], rank: int) -> AgreedSteps:
    """Returns what all ranks can put together. A generation counts only if its ranks lie on the nodes as they do now,
    and the job has as many ranks as then.

    Args:
        offers: by rank.
        rank: of the caller.
    """
    nodes: dict[str, list[int]] = {}
    for other, offer in enumerate(offers):
        nodes.setdefault(offer.node, []).append(other)
    common = None
    for offer in offers:
        here = tuple(nodes[offer.node])
        fitting = {
            (generation.step, generation.series)
            for generation in offer.generations
            if generation.world == len(offers) and generation.ranks == here
        }
        if common is None:
            common = fitting
        else:
            common &= fitting
    own = offers[rank]
    newer_than = max(offer.newer_than for offer in offers)
    node_ranks = tuple(nodes[own.node])
    agreed = []
    left_out = []
    for generation in sorted(own.generations, key=lambda found: (found.step, found.series), reverse=True):
        is_common = (generation.step, generation.series) in (common or set())
        if is_common and generation.world == len(offers) and generation.ranks == node_ranks:
            agreed.append(generation)
        elif generation.step > newer_than:
            left_out.append(generation)
    return AgreedSteps(
        candidates=tuple(generation for generation in agreed if generation.step > newer_than),
        older=tuple(generation.step for generation in agreed if generation.step <= newer_than),
        left_out=tuple(left_out),
        node_ranks=node_ranks,
        newer_than=newer_than,
        series=offers[0].series,
    )
