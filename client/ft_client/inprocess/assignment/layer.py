"""The user's description of one layer of a `Tree`. Pure.

`Tree` takes a list of them. What a layer does to ranks is in `topology.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ft_client.inprocess.assignment.group_key import KeyOrFn, check_key


class LayerFlag(enum.Flag):
    """How a terminated active rank may be replaced within its own branch of this layer."""

    RESERVE = enum.auto()
    """By a spare of the branch."""
    BACKFILL = enum.auto()
    """By the active rank of the branch with the highest number."""


@dataclass(frozen=True)
class Layer:
    """One grouping of ranks: by node, by rack, or all of them.

    Args:
        min_ranks: a branch with fewer healthy ranks is terminated as a whole.
        max_ranks: maximum number of active ranks in a branch; None: no limit.
        key_or_fn: the key of a rank's branch: any hashable value, or a function of `(state)` or `(rank, world_size)`.
        flag: has an effect in a layer only if all layers below have it too.

    Raises:
        TypeError: a field has another type.
        ValueError: `max_ranks` is below 1 or below `min_ranks`.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: KeyOrFn = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_key(self.key_or_fn)
        for name, value in (("min_ranks", self.min_ranks), ("max_ranks", self.max_ranks)):
            if type(value) is not int and not (value is None and name == "max_ranks"):
                raise TypeError(f"{name}={value!r} is not a whole number")
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag={self.flag!r} is not a LayerFlag")
        if self.max_ranks is not None and self.max_ranks < max(self.min_ranks, 1):
            raise ValueError(f"max_ranks={self.max_ranks} is below min_ranks={self.min_ranks} or 1")

    def has(self, flag: LayerFlag) -> bool:
        """Whether the layer has this flag."""
        return self.flag is not None and flag in self.flag
