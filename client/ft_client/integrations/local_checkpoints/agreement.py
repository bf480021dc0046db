"""What all ranks agree upon: whether a save fits everywhere, and which save all of them can load. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rank_monitor.contract.memory_room import size_in_words


@dataclass(frozen=True)
class Bid:
    """What one rank says before a save.

    Attributes:
        node: tells the rank's node from others.
        token: that the rank has drawn; rank 0's counts.
        need: bytes that its part will have, as far as known.
        left_for_files: bytes that all new parts of its node may have together.
        left_in_memory: bytes that all new parts of its node and the copies on the host may have together.
        left_for_copies: bytes that the copies of its node may have together in shared memory, beside the new parts.
            Only a persistent worker gets such copies.
        refused: why it cannot save; empty: it can.
    """

    node: str
    token: str
    need: int
    left_for_files: int
    left_in_memory: int
    left_for_copies: int
    refused: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SaveVerdict:
    """What follows from all bids; the same on all ranks.

    Attributes:
        token: of the save.
        refused: why no rank saves; empty: all do.
        copies_fit: whether a persistent worker can get its copies on all nodes.
    """

    token: str
    refused: str
    copies_fit: bool = True


def decide_save(bids: Sequence[Bid]) -> SaveVerdict:
    """Returns whether all ranks save. `bids`: by rank."""
    token = bids[0].token
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank, bid in enumerate(bids):
        if bid.refused:
            return SaveVerdict(token, f"rank {rank}: {bid.refused}")
        nodes[bid.node].append(rank)
    copies_fit = True
    for ranks in nodes.values():
        need = sum(bids[rank].need for rank in ranks)
        left = min(bids[rank].left_for_files for rank in ranks)
        in_memory = min(bids[rank].left_in_memory for rank in ranks)
        where = f"the node of rank {ranks[0]}"
        if need > left:
            missing = size_in_words(need - left)
            return SaveVerdict(
                token,
                f"parts of {size_in_words(need)} do not fit into the {size_in_words(left)} that are left on {where}"
                f" ({missing} are missing)",
            )
        # A part is copied to the host before it is written.
        if 2 * need > in_memory:
            return SaveVerdict(
                token,
                f"parts of {size_in_words(need)} and their copies do not fit into the {size_in_words(in_memory)} of"
                f" memory that are left on {where}",
            )
        copies_fit = copies_fit and need <= min(bids[rank].left_for_copies for rank in ranks)
    return SaveVerdict(token, "", copies_fit)


@dataclass(frozen=True, order=True)
class Save:
    """One save of the whole job: an iteration may have been saved more than once."""

    iteration: int
    token: str


@dataclass(frozen=True)
class SeenSaves:
    """What all ranks say to each other when they look for a local checkpoint; the same on all, but for `node_ranks`.

    Attributes:
        number: digits that tell this look from others.
        reached: the last iteration that a rank has noted before; 0: none has.
        node_ranks: the ranks of this rank's node, ascending.
        offers: by rank, the saves of which it has its part.
    """

    number: str
    reached: int
    node_ranks: tuple[int, ...]
    offers: tuple[tuple[Save, ...], ...]


def seen_saves(said: Sequence[Any], rank: int) -> SeenSaves:
    """Returns what follows from what all ranks say.

    Args:
        said: by rank: node, last iteration that was noted there, random digits, saves as pairs.
        rank: of the caller.
    """
    node_ranks = tuple(other for other, of_rank in enumerate(said) if of_rank[0] == said[rank][0])
    offers = tuple(tuple(Save(*save) for save in of_rank[3]) for of_rank in said)
    return SeenSaves(said[0][2], max(of_rank[1] for of_rank in said), node_ranks, offers)


def common_saves(offers: Sequence[Sequence[Save]]) -> list[Save]:
    """Returns the saves of which each rank has its part, the newest iteration first.

    Args:
        offers: by rank, what each has.
    """
    found = set(offers[0])
    for offer in offers:
        found &= set(offer)
    return sorted(found, reverse=True)


def newest_left_out(offers: Sequence[Sequence[Save]], common: Sequence[Save]) -> int | None:
    """Returns the newest iteration that a rank has and that is newer than all that can be loaded; None: there is
    none."""
    newest = max((save.iteration for offer in offers for save in offer), default=None)
    if newest is None or (common and common[0].iteration >= newest):
        return None
    return newest
