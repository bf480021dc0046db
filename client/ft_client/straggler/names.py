"""The order in which all ranks agree to send their medians: which kinds of kernels, which sections; and who is where.

The same on every rank at any time. Pure: words to send out, words of all ranks in. A kernel goes by a digest of its
name, which may be a page long; only its own rank ever shows that name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ft_client.straggler.kernels import MAX_KERNELS

_KERNEL, _SECTION, _NODE = "k", "s", "n"


@lru_cache(2 * MAX_KERNELS)
def digest(kernel: str) -> str:
    """Eight bytes that stand for the name of a kernel."""
    return hashlib.blake2b(kernel.encode(), digest_size=8).hexdigest()


class Names:
    """What was agreed so far."""

    def __init__(self, rank: int, node: str) -> None:
        self.kernels: dict[str, None] = {}
        self.sections: dict[str, None] = {}
        self.nodes: dict[int, str] = {}
        self._rank, self._node = rank, node

    def new(self, kernels: Iterable[str], sections: Iterable[str]) -> list[str]:
        """The words that must travel before these medians can. Kernels beyond the bound never do."""
        words = [_SECTION + name for name in sections if name not in self.sections]
        if len(self.kernels) < MAX_KERNELS:
            words += [_KERNEL + name for name in kernels if name not in self.kernels]
        if self._rank not in self.nodes:
            words.append(f"{_NODE}{self._rank}:{self._node}")
        return words

    def learn(self, words: Iterable[str]) -> None:
        """Takes in the new words of all ranks, in the order that all have them in."""
        for word in words:
            kind, name = word[0], word[1:]
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
        """The values in the agreed order, with what stands for an absent kernel and for an absent section."""
        of_kernels = [kernels.get(name, absent[0]) for name in self.kernels]
        return of_kernels + [sections.get(name, absent[1]) for name in self.sections]
