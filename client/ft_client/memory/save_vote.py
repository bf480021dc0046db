"""What the ranks say to each other at the beginning of a save, in one all-reduce. Collective, but decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ft_client.rank.agreement import group

NOT_COMPARED = 0
"""The checksum that all ranks give where the replicated state is not compared."""
UNKNOWN = -1
"""The checksum of a rank that could not compute it; less than any other."""


@dataclass(frozen=True)
class Vote:
    """What one rank says.

    Attributes:
        wish: the interval that it would choose.
        has_failed: whether its last save has failed.
        is_off: whether it can save no more.
        step: after which it is.
        checksum: of the replicated state, or one of the above.
    """

    wish: int
    has_failed: bool
    is_off: bool
    step: int
    checksum: int


@dataclass(frozen=True)
class VoteResult:
    """What follows from the votes of all ranks; the same on all.

    Attributes:
        interval: the largest that a rank wishes for.
        has_any_failed: whether the last save of a rank has failed.
        is_any_off: whether a rank can save no more.
        first_step: the least after which a rank is.
        last_step: the largest.
        is_compared: whether all ranks have given a checksum.
        is_alike: whether it is the same on all.
    """

    interval: int
    has_any_failed: bool
    is_any_off: bool
    first_step: int
    last_step: int
    is_compared: bool
    is_alike: bool


def exchange(own: Vote) -> VoteResult:
    """Returns what follows from the votes of all ranks. Collective."""
    (_, wish), (_, failed), (_, off), (first, last), (low, high) = group.range_over_ranks(
        [own.wish, own.has_failed, own.is_off, own.step, own.checksum]
    )
    return VoteResult(int(wish), bool(failed), bool(off), int(first), int(last), low != UNKNOWN, low == high)
