"""The exchange between the ranks for one report: a minimum of the medians, and the names that their order needs.

A collective reduces rows of numbers, so all ranks must put their medians into the same order, although each rank may
have sections and kernels that other ranks lack. `AgreedNames` keeps that order: it grows by the names that the ranks
send each other. A kernel goes by a digest of its name, which may be a page long.

`Exchange` makes the collectives of a report: one minimum, as a rule. When any rank has names that the other ranks have
not received yet, a union of the new names and a second minimum follow. A rank alone makes none. Every rank makes the
same calls in the same order. `detector.py` calls `Exchange`; what the medians mean is not known here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ft_client.rank.agreement import group
from ft_client.straggler.kernels import MAX_KERNELS
from ft_client.straggler.reporting import References

_KERNEL, _SECTION, _NODE = "k", "s", "n"
"""The first letter of a text that the ranks send: what it names."""
_HAS_NEW, _HAS_NONE = 0.0, 1.0
"""The first number of a row. The minimum over the ranks is `_HAS_NEW` if any rank has new names."""
_RUNS_NOT = -1.0
"""The median of a kernel that a rank did not run: below every duration, so that the minimum over the ranks shows it."""


@lru_cache(2 * MAX_KERNELS)
def digest(kernel: str) -> str:
    """Returns eight bytes, in hexadecimal digits, that stand for the name of a kernel."""
    return hashlib.blake2b(kernel.encode(), digest_size=8).hexdigest()


class AgreedNames:
    """The names that all ranks know, in an order that is the same on all ranks. Makes no call to other ranks.

    Attributes:
        kernels: digests of kernels' names, in order.
        sections: names of sections, in order.
        nodes: rank -> the name of its node.
    """

    def __init__(self, rank: int, node: str) -> None:
        self.kernels: dict[str, None] = {}
        self.sections: dict[str, None] = {}
        self.nodes: dict[int, str] = {}
        self._rank = rank
        self._node = node

    def new(self, kernels: Iterable[str], sections: Iterable[str]) -> list[str]:
        """Returns the texts that this rank must send before it can send these medians.

        Kernels beyond `MAX_KERNELS` are never sent, and so never compared.
        """
        texts = [_SECTION + name for name in sections if name not in self.sections]
        if len(self.kernels) < MAX_KERNELS:
            texts += [_KERNEL + name for name in kernels if name not in self.kernels]
        if self._rank not in self.nodes:
            texts.append(f"{_NODE}{self._rank}:{self._node}")
        return texts

    def learn(self, texts: Iterable[str]) -> None:
        """Adds the new texts of all ranks. They must come in the same order on all ranks."""
        for text in texts:
            kind, name = text[0], text[1:]
            if kind == _SECTION:
                self.sections[name] = None
            elif kind == _NODE:
                rank, _, node = name.partition(":")
                self.nodes[int(rank)] = node
            elif len(self.kernels) < MAX_KERNELS:
                self.kernels[name] = None

    def row(
        self, kernels: Mapping[str, float], sections: Mapping[str, float], absent: tuple[float, float]
    ) -> list[float]:
        """Returns the medians in the agreed order, kernels first.

        Args:
            kernels: digest -> median.
            sections: name -> median.
            absent: what stands for a kernel that is not in `kernels`, and for a section that is not in `sections`.
        """
        of_kernels = [kernels.get(name, absent[0]) for name in self.kernels]
        return of_kernels + [sections.get(name, absent[1]) for name in self.sections]


class Exchange:
    """The collectives of one detection, from its first report to its last."""

    def __init__(self, node: str) -> None:
        self.rank = group.rank()
        self.names = AgreedNames(self.rank, node)

    def references(self, kernels: Mapping[str, float], sections: Mapping[str, float]) -> References:
        """Returns the smallest median over all ranks, of this rank's kernels and sections. Collective.

        A kernel counts only if every rank that runs kernels at all ran it: the stages of a pipeline run different ones.
        A section counts if any rank has it. Afterwards all names are agreed.

        Args:
            kernels: name -> this rank's median.
            sections: name -> this rank's median.
        """
        by_digest = {digest(name): median for name, median in kernels.items()}
        lowest = self._lowest(by_digest, sections)
        if lowest[0] == _HAS_NEW:
            self.names.learn(group.union_over_ranks(self.names.new(by_digest, sections)))
            lowest = self._lowest(by_digest, sections)
        count = 1 + len(self.names.kernels)
        of_kernels = dict(zip(self.names.kernels, lowest[1:count], strict=True))
        of_sections = dict(zip(self.names.sections, lowest[count:], strict=True))
        smallest = {name: of_kernels.get(digest(name), _RUNS_NOT) for name in kernels}
        return References(
            {name: value for name, value in smallest.items() if 0 <= value < math.inf},
            {name: of_sections[name] for name in sections},
        )

    def _lowest(self, kernels: Mapping[str, float], sections: Mapping[str, float]) -> list[float]:
        """Returns a row: whether any rank has new names, then the smallest median of each agreed name. Collective.

        A kernel that one rank did not run is negative in the row. A rank without any kernel, such as one without a GPU,
        does not take part in the minimum of kernels.
        """
        absent = (_RUNS_NOT if kernels else math.inf, math.inf)
        if self.names.new(kernels, sections):
            flag = _HAS_NEW
        else:
            flag = _HAS_NONE
        return group.min_over_ranks([flag, *self.names.row(kernels, sections, absent)])
