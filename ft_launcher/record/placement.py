"""`Placement`: which ranks of a cycle run on this node, and the numbers that the job has for them. Data only.

The node agent fills one for each cycle, from torch's `WorkerGroup`. Ranks, evidence, restart in process and recorder
read it: they need nothing else of torch's group.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_NODE = -1
"""The `node_rank` of a node that has taken part in no cycle yet."""


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of one rank: on its node, in the job, and among the ranks of its role."""

    local_rank: int
    rank: int
    role_rank: int


@dataclass(frozen=True)
class Placement:
    """The part of one node in one cycle.

    Attributes:
        node_rank: of this node among the nodes of the cycle; `NO_NODE` before the first cycle.
        nodes: how many nodes the cycle has.
        ranks: of this node, in the order of local ranks.
        world_size: how many ranks the cycle has on all nodes.
        role_world_size: how many of these have the role of this node.
        master_addr, master_port: where the ranks of the cycle meet.
        shares_store: whether the ranks use the store that the launcher hosts.
    """

    cycle: int
    node_rank: int
    nodes: int
    ranks: tuple[RankNumbers, ...]
    world_size: int
    role: str
    role_world_size: int
    run_id: str
    max_restarts: int
    master_addr: str
    master_port: int
    shares_store: bool

    @property
    def has_rank0(self) -> bool:
        """Whether rank 0 of the job runs on this node."""
        return self.node_rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this node runs all ranks of the cycle."""
        return self.nodes == 1
