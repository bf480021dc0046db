"""The rank of this process in its job, and whether a fault is meant for it.

`requested_faults.py` asks it about each fault. Where the rank or the kind is left to chance, all ranks draw the same
numbers: they agree on the rank that fails without a message between them.
Only `this_rank` reads the environment; everything else depends on its arguments alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

from rank_monitor.contract import env
from rank_monitor.contract.settings.injection import ALL, ANY, OF_RANDOM, RANDOM, Injection, kind_of

_SHARED = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""Variables that have the same values on all ranks of a job, and other values in the next run."""


@dataclass(frozen=True)
class ThisRank:
    """A rank of a cycle.

    Attributes:
        rank: its number in the job.
        world: how many ranks there are.
        local_rank: its number on its node.
        node: the number of its node.
        cycle: the number of the cycle.
        run: a text that is the same on all ranks, and another in the next run: what is drawn depends on it.
        again: whether the rank was started again alone in its cycle.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: int = 0
    cycle: int = 0
    run: str = ""
    again: bool = False

    def dice(self, fault: Injection, what: str) -> random.Random:
        """Returns the random generator for one property of a fault: the same on all ranks, another in each cycle.

        Args:
            fault: the fault; its `seed`, where it has one, replaces what differs from run to run.
            what: the property that is drawn, such as `rank`.
        """
        return random.Random(f"{fault.seed or self.run}|{self.cycle}|{fault}|{what}")

    def is_meant(self, fault: Injection) -> bool:
        """Returns whether the fault is for this rank in this cycle.

        A rank that was started again alone is meant only by `cycle:any`: else a fault that killed it would kill it
        again, without end. A fault with `node` means the node's first rank.
        """
        in_cycle = fault.cycle == ANY or (fault.cycle == self.cycle and not self.again)
        if fault.node is not None:
            return in_cycle and (fault.node, 0) == (self.node, self.local_rank)
        return in_cycle and (fault.rank == ALL or self.rank_of(fault) == self.rank)

    def rank_of(self, fault: Injection) -> int:
        """Returns the rank that a fault names or that is drawn for it; this rank for a fault of all ranks."""
        if fault.rank == RANDOM and fault.node is None:
            return self.dice(fault, "rank").randrange(self.world)
        if isinstance(fault.rank, int):
            return fault.rank
        return self.rank

    def kind_of(self, fault: Injection) -> str:
        """Returns the kind that a fault names, or that is drawn for it."""
        if fault.kind == RANDOM:
            return kind_of(self.dice(fault, "kind").choice(OF_RANDOM))
        return fault.kind


def this_rank(environ: Mapping[str, str] = os.environ) -> ThisRank:
    """Returns the rank that the launcher's variables describe: ours, torchrun's or Slurm's.

    Without any of them this rank is the only rank of its job.
    """

    def number(*names: str) -> int:
        found = next((environ[name] for name in names if name in environ), "0")
        if found.isdigit():
            return int(found)
        return 0

    return ThisRank(
        rank=number("RANK", "SLURM_PROCID"),
        world=number("WORLD_SIZE", "SLURM_NTASKS") or 1,
        local_rank=number("LOCAL_RANK", "SLURM_LOCALID"),
        node=number("GROUP_RANK", "SLURM_NODEID"),
        cycle=number(env.CYCLE, "TORCHELASTIC_RESTART_COUNT"),
        run="|".join(environ.get(name, "") for name in _SHARED),
        again=env.REJOIN in environ,
    )
