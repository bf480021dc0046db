"""Layers that group ranks, and all ranks as the leaves of a tree of layers: which are active after each loss. Pure.

`rank_assignment.py: Tree` makes one `Topology` for a call, and asks it before each round. Every rank has the whole
tree, and computes the same from the keys that were gathered once.

Words: a *layer* is one way to group ranks, such as by node. A *branch* is one group of a layer, such as one node. A
*leaf* is one rank; its branches lead from the root, which holds all ranks, down. A *key* says which branch of a layer a
rank belongs to. It is any hashable value, or the result of the user's function for the rank. Ranks exchange keys as
text, so that nothing is unpickled: equal keys have equal texts in every process.

Leaves are in depth-first order, siblings in the order of their ranks at entry, so that the leaves of a branch are
consecutive. An update takes O(ranks x layers).
"""

from __future__ import annotations

import enum
import inspect
import numbers
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_client.inprocess.state import Mode, State

KeyOrFn = Hashable | Callable[..., Any]


def check_key(key_or_fn: object) -> None:
    """Checks a key, or a function that returns one.

    Raises:
        TypeError: it is neither hashable nor a function of `(state)` or `(rank, world_size)`.
    """
    if callable(key_or_fn):
        _takes_rank_and_world_size(key_or_fn)
        return
    try:
        hash(key_or_fn)
    except TypeError:
        raise TypeError(f"key_or_fn={key_or_fn!r} is neither hashable nor a function") from None


def group_key(key_or_fn: KeyOrFn, state: State) -> str:
    """Returns the key of the rank in this state, as text. Calls the user's function, where the key is one."""
    if not callable(key_or_fn):
        return text_of(key_or_fn)
    if _takes_rank_and_world_size(key_or_fn):
        return text_of(key_or_fn(state.rank, state.world_size))
    return text_of(key_or_fn(state.freeze()))


def text_of(key: object) -> str:
    """Returns the text of a key, the same in every process.

    `1`, `1.0` and True are the same key, as in a dict; `1` and `"1"` are different keys. The items of a frozenset are
    sorted, since their order differs between processes.
    """
    if isinstance(key, tuple):
        return f"({', '.join(map(text_of, key))})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted(map(text_of, key)))}}}"
    if isinstance(key, numbers.Integral):
        return repr(int(key))
    if isinstance(key, numbers.Real):
        number = float(key)
        if number.is_integer():
            return repr(int(number))
        return repr(number)
    return repr(key)


def _takes_rank_and_world_size(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes `(rank, world_size)`; if not, it takes `(state)`.

    Raises:
        TypeError: the function takes neither.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return False
    for arguments in (1, 2):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments == 2
    raise TypeError(f"key_or_fn={function!r} takes neither (state) nor (rank, world_size)")


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
        """Returns whether the layer has this flag."""
        return self.flag is not None and flag in self.flag


@dataclass(eq=False)
class Branch:
    """One group of a layer, with the numbers of its healthy and of its active ranks."""

    layer: Layer
    leaves: list[Leaf] = field(default_factory=list)
    healthy: int = 0
    active: int = 0

    def has_room(self) -> bool:
        """Returns whether one more rank of this branch may be active."""
        return self.layer.max_ranks is None or self.active < self.layer.max_ranks


@dataclass(eq=False)
class Leaf:
    """One rank.

    Attributes:
        initial_rank: its number at entry.
        branches: the branches that it belongs to, from the root down.
        rank: its number among all healthy ranks; None: it is terminated.
        active_rank: its number among the active ranks; None: it is not active.
        mode: active, a spare (INACTIVE) or terminated.
    """

    initial_rank: int
    branches: tuple[Branch, ...]
    rank: int | None
    active_rank: int | None = None
    mode: Mode = Mode.INACTIVE

    def activate(self, active_rank: int) -> None:
        """Makes a spare active, with this number."""
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
        """Returns whether all its branches may have one more active rank."""
        return all(branch.has_room() for branch in self.branches)

    def ancestors(self, flag: LayerFlag) -> Iterator[Branch]:
        """Yields its branches from the lowest up, and stops before the first whose layer lacks the flag."""
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
        """Returns the rank that had this number at entry."""
        return self._by_initial_rank[initial_rank]

    def start(self, size_filter: Callable[[int], int] | None = None) -> None:
        """Activates ranks for the first round: in order, as many as the layers allow.

        Branches that are too small are terminated before.

        Args:
            size_filter: as of `lose`.
        """
        self._terminate([])
        active = 0
        for leaf in self._by_initial_rank.values():
            if leaf.mode is Mode.INACTIVE and leaf.has_room():
                leaf.activate(active)
                active += 1
        self._settle(size_filter)

    def lose(self, ranks: Collection[int], size_filter: Callable[[int], int] | None = None) -> None:
        """Replaces lost ranks, and numbers the remaining ranks again.

        Args:
            ranks: the present numbers of the terminated ranks.
            size_filter: takes how many ranks could be active, and returns how many the function can use.

        Raises:
            ValueError: `size_filter` returned more than it was given, or something that is not a number of ranks.
        """
        lost = self._terminate([self._healthy[rank] for rank in ranks])
        lost = self._replace_by_spares(lost)
        self._backfill(lost)
        self._settle(size_filter)

    def _terminate(self, leaves: Sequence[Leaf]) -> list[tuple[int, Leaf]]:
        """Terminates leaves, then every branch that is too small.

        The deepest branches come first: a node that is given up may make its rack too small.

        Returns:
            The terminated leaves that were active, each with the number it had among the active ranks, in its order.
        """
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
        """Gives the numbers of lost active ranks to spares of the nearest branch with RESERVE.

        Returns:
            The lost ranks that no spare replaces, in the form of the argument.
        """
        spares: dict[Branch, Iterator[Leaf]] = {}

        def spare_of(branch: Branch) -> Leaf | None:
            # No leaf is deactivated meanwhile, so a leaf that had no room once has none later either.
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
        """Moves the highest active ranks of each branch with BACKFILL into the gaps of that branch.

        The gaps of a lost rank belong to the topmost branch up to which all layers have the flag. Of all numbers in the
        branch, those of active ranks and the free ones, the lowest stay in use.
        """
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
