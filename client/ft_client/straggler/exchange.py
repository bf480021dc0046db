"""What the ranks tell each other for one report: one minimum of the references, one gathering of the scores.

A union and a second minimum when any rank has names that the others have not heard yet. Alone, nothing.
Every rank makes the same calls in the same order. Knows no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ft_client import group
from ft_client.straggler.names import Names, digest

_HAS_NEW, _HAS_NONE = 0.0, 1.0
_RUNS_NOT = -1.0


@dataclass(frozen=True)
class References:
    """The smallest median over all ranks, by name: of kernels that every rank with kernels ran, of sections of any."""

    kernels: Mapping[str, float]
    sections: Mapping[str, float]


class Exchange:
    """The collectives of one detection, from its first report to its last."""

    def __init__(self, node: str) -> None:
        self.rank = group.rank()
        self.names = Names(self.rank, node)

    def references(self, kernels: Mapping[str, float], sections: Mapping[str, float]) -> References:
        """The references that follow from all ranks' medians. Collective; all names are agreed afterwards."""
        by_digest = {digest(name): median for name, median in kernels.items()}
        lowest = self._lowest(by_digest, sections)
        if lowest[0] == _HAS_NEW:
            self.names.learn(group.union_over_ranks(self.names.new(by_digest, sections)))
            lowest = self._lowest(by_digest, sections)
        count = 1 + len(self.names.kernels)
        of_kernels = dict(zip(self.names.kernels, lowest[1:count], strict=True))
        of_sections = dict(zip(self.names.sections, lowest[count:], strict=True))
        return References(
            {name: value for name in kernels if 0 <= (value := of_kernels.get(digest(name), _RUNS_NOT)) < math.inf},
            {name: of_sections[name] for name in sections},
        )

    def _lowest(self, kernels: Mapping[str, float], sections: Mapping[str, float]) -> list[float]:
        """A kernel that one rank did not run has no reference; a rank without any kernel does not take part."""
        absent = (_RUNS_NOT if kernels else math.inf, math.inf)
        flag = _HAS_NEW if self.names.new(kernels, sections) else _HAS_NONE
        return group.min_over_ranks([flag, *self.names.row(kernels, sections, absent)])
