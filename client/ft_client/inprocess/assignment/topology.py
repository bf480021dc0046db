"""All ranks as the leaves of a tree of layers, and which of them are active after each loss. Pure.

`Tree` asks it. Every rank computes the same from the keys that were gathered once. Leaves are in depth-first order,
siblings in the order of their ranks at entry, so that the leaves of a branch are consecutive. An update takes O(ranks x
layers).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ft_client.inprocess.assignment.layer import Layer, LayerFlag
from ft_client.inprocess.state import Mode


@dataclass(eq=False)
class Branch:
    """One group of a layer, with the numbers of its healthy and of its active ranks."""

    layer: Layer
    leaves: list[Leaf] = field(default_factory=list)
    healthy: int = 0
    active: int = 0

    def has_room(self) -> bool:
        """Whether one more rank may be active."""
        return self.layer.max_ranks is None or self.active < self.layer.max_ranks


@dataclass(eq=False)
class Leaf:
    """One rank: its number at entry, its branches from the root down, and its numbers now (None: it has none)."""

    initial_rank: int
    branches: tuple[Branch, ...]
    rank: int | None
    active_rank: int | None = None
    mode: Mode = Mode.INACTIVE

    def activate(self, active_rank: int) -> None:
        """Makes an inactive rank active."""
        self.mode, self.active_rank = Mode.ACTIVE, active_rank
        for branch in self.branches:
            branch.active += 1

    def deactivate(self, mode: Mode) -> None:
        """Makes a healthy rank a spare or a terminated one, as `mode` says."""
        for branch in self.branches:
            if self.mode is Mode.ACTIVE:
                branch.active -= 1
            if mode is Mode.TERMINATED:
                branch.healthy -= 1
        self.mode, self.active_rank = mode, None

    def has_room(self) -> bool:
        """Whether all its branches may have one more active rank."""
        return all(branch.has_room() for branch in self.branches)

    def ancestors(self, flag: LayerFlag) -> Iterator[Branch]:
        """Its branches from the lowest up to the first one without the flag."""
        for branch in reversed(self.branches):
            if not branch.layer.has(flag):
                return
            yield branch


class Topology:
    """The ranks of a call in their branches.

    Args:
        layers: from the root down.
        paths: for each rank at entry its keys, one for each layer.

    Raises:
        ValueError: the number of keys differs from that of the layers, or the first layer has more than one key.
    """

    def __init__(self, layers: Sequence[Layer], paths: Mapping[int, Sequence[str]]) -> None:
        prefixes = {rank: [tuple(path[: depth + 1]) for depth in range(len(path))] for rank, path in paths.items()}
        branches: dict[tuple[str, ...], Branch] = {}
        for rank in sorted(paths):
            if len(paths[rank]) != len(layers):
                raise ValueError(f"rank {rank} has {len(paths[rank])} keys for {len(layers)} layers")
            for depth, prefix in enumerate(prefixes[rank]):
                branches.setdefault(prefix, Branch(layers[depth]))
        roots = [prefix[0] for prefix in branches if len(prefix) == 1]
        if len(roots) > 1:
            raise ValueError(
                f"all ranks need the same key in the first layer, and these are {', '.join(sorted(roots))}"
            )
        place = {prefix: number for number, prefix in enumerate(branches)}
        self._by_initial_rank: dict[int, Leaf] = {}
        for rank in sorted(paths, key=lambda rank: ([place[prefix] for prefix in prefixes[rank]], rank)):
            above = tuple(branches[prefix] for prefix in prefixes[rank])
            leaf = self._by_initial_rank[rank] = Leaf(rank, above, None)
            for branch in above:
                branch.leaves.append(leaf)
                branch.healthy += 1
        self._deepest_first = [branches[prefix] for prefix in sorted(branches, key=len, reverse=True)]
        self._healthy: list[Leaf] = list(self._by_initial_rank.values())

    @property
    def initial_ranks(self) -> list[int]:
        """The numbers at entry of all ranks, in depth-first order."""
        return list(self._by_initial_rank)

    @property
    def world_size(self) -> int:
        """The number of healthy ranks."""
        return len(self._healthy)

    @property
    def active_world_size(self) -> int:
        """The number of active ranks."""
        return sum(leaf.mode is Mode.ACTIVE for leaf in self._healthy)

    def leaf(self, initial_rank: int) -> Leaf:
        """The rank that had this number at entry."""
        return self._by_initial_rank[initial_rank]

    def start(self, size_filter: Callable[[int], int] | None = None) -> None:
        """Activates ranks for the first iteration: in order, as many as the layers allow.

        Branches that are too small are terminated before.
        """
        self._terminate([])
        active = 0
        for leaf in self._by_initial_rank.values():
            if leaf.mode is Mode.INACTIVE and leaf.has_room():
                leaf.activate(active)
                active += 1
        self._settle(size_filter)

    def lose(self, ranks: Collection[int], size_filter: Callable[[int], int] | None = None) -> None:
        """Replaces lost ranks and numbers the others again.

        Args:
            ranks: the present numbers of the terminated ranks.
            size_filter: returns how many ranks the function can use, given how many could be active.

        Raises:
            ValueError: `size_filter` returned more than that, or something that is not a number of ranks.
        """
        lost = self._terminate([self._healthy[rank] for rank in ranks])
        lost = self._replace_by_spares(lost)
        self._backfill(lost)
        self._settle(size_filter)

    def _terminate(self, leaves: Sequence[Leaf]) -> list[tuple[int, Leaf]]:
        """Terminates leaves, then every branch that is too small. Returns those that were active, by their numbers."""
        lost = []

        def terminate(leaf: Leaf) -> None:
            if leaf.active_rank is not None:
                lost.append((leaf.active_rank, leaf))
            leaf.deactivate(Mode.TERMINATED)

        for leaf in leaves:
            terminate(leaf)
        for branch in self._deepest_first:
            if 0 < branch.healthy < branch.layer.min_ranks:
                for leaf in branch.leaves:
                    if leaf.mode is not Mode.TERMINATED:
                        terminate(leaf)
        return sorted(lost, key=lambda entry: entry[0])

    def _replace_by_spares(self, lost: list[tuple[int, Leaf]]) -> list[tuple[int, Leaf]]:
        """Gives the numbers of lost ranks to spares of the nearest reserve. Returns the numbers that are left."""
        spares: dict[Branch, Iterator[Leaf]] = {}

        def spare_of(branch: Branch) -> Leaf | None:
            # No leaf is deactivated meanwhile, so one that was passed over cannot be used later either.
            candidates = spares.setdefault(branch, iter(branch.leaves))
            return next((leaf for leaf in candidates if leaf.mode is Mode.INACTIVE and leaf.has_room()), None)

        left = []
        for active_rank, leaf in lost:
            nearest = map(spare_of, leaf.ancestors(LayerFlag.RESERVE))
            spare = next(filter(None, nearest), None)
            if spare:
                spare.activate(active_rank)
            else:
                left.append((active_rank, leaf))
        return left

    def _backfill(self, lost: list[tuple[int, Leaf]]) -> None:
        """Moves the highest active ranks of each backfill branch into its gaps."""
        gaps: dict[Branch, list[int]] = {}
        for active_rank, leaf in lost:
            *_, top = (None, *leaf.ancestors(LayerFlag.BACKFILL))
            if top is not None:
                gaps.setdefault(top, []).append(active_rank)
        for branch, free in gaps.items():
            held = sorted((leaf.active_rank, leaf) for leaf in branch.leaves if leaf.active_rank is not None)
            kept = set(sorted([*free, *(number for number, _ in held)])[: len(held)])
            movers = [leaf for number, leaf in held if number not in kept]
            for mover, number in zip(movers, [number for number in free if number in kept], strict=True):
                mover.active_rank = number

    def _settle(self, size_filter: Callable[[int], int] | None) -> None:
        """Closes the remaining gaps, applies the filter, and numbers the healthy ranks."""
        active = [leaf for leaf in self._by_initial_rank.values() if leaf.active_rank is not None]
        active.sort(key=lambda leaf: leaf.active_rank or 0)
        size = len(active)
        if size_filter is not None:
            size = size_filter(len(active))
            if type(size) is not int or not 0 <= size <= len(active):
                raise ValueError(f"world_size_filter returned {size!r} for {len(active)} active ranks")
        for number, leaf in enumerate(active):
            if number < size:
                leaf.active_rank = number
            else:
                leaf.deactivate(Mode.INACTIVE)
        for leaf in self._healthy:
            leaf.rank = None
        self._healthy = [leaf for leaf in self._by_initial_rank.values() if leaf.mode is not Mode.TERMINATED]
        for number, leaf in enumerate(self._healthy):
            leaf.rank = number
