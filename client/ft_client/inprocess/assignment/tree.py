"""The rank assignment by topology: ranks in layers, each layer with its own limits and spares.

Public in `rank_assignment.py`. It gathers the keys of all ranks at the first call; `topology.py` decides.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from ft_client.inprocess.assignment.base import RankAssignment, RankAssignmentCtx, RankDiscarded
from ft_client.inprocess.assignment.group_key import group_key
from ft_client.inprocess.assignment.layer import Layer
from ft_client.inprocess.assignment.topology import Topology
from ft_client.inprocess.exception import InternalError
from ft_client.inprocess.state import Mode, State

logger = logging.getLogger(__name__)


class Tree(RankAssignment):
    """Numbers and activates ranks within a tree of layers. It cannot be composed with other rank assignments.

    After a loss, in this order: a branch with fewer healthy ranks than `min_ranks` is terminated; a terminated active
    rank is replaced by a spare of its nearest RESERVE branch, or else by the last active rank of its BACKFILL branch;
    the remaining gaps are closed; `world_size_filter` makes the last active ranks spares.

    Args:
        layers: from the root, which all ranks share, down.
        world_size_filter: returns how many ranks shall be active, given how many could be.

    Raises:
        TypeError: an item is not a `Layer`.
        ValueError: there are no layers.
    """

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        self.layers, self.world_size_filter = list(layers), world_size_filter
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"{layer!r} in layers is not a Layer")
        if not self.layers:
            raise ValueError("layers is empty")
        self._topology: Topology | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context with this rank's new numbers.

        Raises:
            RankDiscarded: this rank is terminated, or its branch is too small.
            ValueError: ranks have different keys in the first layer, or the filter returned an impossible number.
            InternalError: another rank assignment changed the state since the last call.
            RuntimeError: the store is lost, or a rank did not call in time.
        """
        state = ctx.state
        if state.rank is None or state.rank in ctx.terminated_ranks:
            raise RankDiscarded(f"rank {state.rank} is terminated")
        if self._topology is None or state.mode is Mode.INITIALIZED:
            self._topology = self._gathered(ctx)
            self._topology.start(self.world_size_filter)
        else:
            self._check_unchanged(state)
            self._topology.lose(ctx.terminated_ranks, self.world_size_filter)
        self._write(state, self._topology)
        ctx.terminated_ranks = set()
        return ctx

    def _gathered(self, ctx: RankAssignmentCtx) -> Topology:
        state = ctx.state
        assert state.rank is not None and state.initial_rank is not None
        healthy = [rank for rank in range(state.world_size) if rank not in ctx.terminated_ranks]
        mine = json.dumps([state.initial_rank, *(group_key(layer.key_or_fn, state) for layer in self.layers)])
        found = ctx.gathers.make(healthy, state.rank, mine, None)
        paths = {int(rank): path for rank, *path in map(json.loads, found)}
        if len(paths) != len(healthy):
            raise InternalError(f"{len(healthy)} ranks have {len(paths)} different initial ranks")
        topology = Topology(self.layers, paths)
        place = topology.initial_ranks.index(state.initial_rank)
        if place != healthy.index(state.rank):
            logger.warning("rank %s of the environment is number %s of the topology", state.rank, place)
        return topology

    def _check_unchanged(self, state: State) -> None:
        assert self._topology is not None and state.initial_rank is not None
        leaf = self._topology.leaf(state.initial_rank)
        if (state.rank, state.active_rank, state.mode) != (leaf.rank, leaf.active_rank, leaf.mode):
            raise InternalError(f"Tree cannot be composed with other rank assignments: {state} is not its work")

    def _write(self, state: State, topology: Topology) -> None:
        assert state.initial_rank is not None
        leaf = topology.leaf(state.initial_rank)
        if leaf.mode is Mode.TERMINATED:
            raise RankDiscarded(f"a branch of rank {state.rank} has fewer healthy ranks than its min_ranks")
        state.rank, state.world_size = leaf.rank, topology.world_size
        state.mode, state.active_rank = leaf.mode, leaf.active_rank
        state.active_world_size = topology.active_world_size
