"""Which rank this process is, and whether a fault is meant for it. Every rank draws the same, so nobody needs to ask.

Pure but for `here`, which reads the environment.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

from rank_monitor.contract import env
from rank_monitor.contract.injection import ALL, ANY, OF_RANDOM, RANDOM, Injection, kind_of

_SHARED = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This rank. `run` is the same on all ranks of a cycle, and another in the next run; `again`: the rank was
    started again alone in its cycle."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: int = 0
    cycle: int = 0
    run: str = ""
    again: bool = False

    def dice(self, fault: Injection, what: str) -> random.Random:
        """What draws `what` of a fault: the same numbers on every rank, others in each cycle."""
        return random.Random(f"{fault.seed or self.run}|{self.cycle}|{fault}|{what}")

    def is_meant(self, fault: Injection) -> bool:
        """Whether the fault is for this rank in this cycle."""
        in_cycle = fault.cycle == ANY or (fault.cycle == self.cycle and not self.again)
        if fault.node is not None:
            return in_cycle and (fault.node, 0) == (self.node, self.local_rank)
        return in_cycle and (fault.rank == ALL or self.rank_of(fault) == self.rank)

    def rank_of(self, fault: Injection) -> int:
        """The rank that a fault names or draws; for `all`, this one."""
        if fault.rank == RANDOM and fault.node is None:
            return self.dice(fault, "rank").randrange(self.world)
        return fault.rank if isinstance(fault.rank, int) else self.rank

    def kind_of(self, fault: Injection) -> str:
        """The kind that a fault names or draws."""
        return kind_of(self.dice(fault, "kind").choice(OF_RANDOM)) if fault.kind == RANDOM else fault.kind


def here(environ: Mapping[str, str] = os.environ) -> Place:
    """This process as its launcher, ours or another, started it; what is not said there is as for a process alone."""

    def number(*names: str) -> int:
        found = next((environ[name] for name in names if name in environ), "0")
        return int(found) if found.isdigit() else 0

    return Place(
        rank=number("RANK", "SLURM_PROCID"),
        world=number("WORLD_SIZE", "SLURM_NTASKS") or 1,
        local_rank=number("LOCAL_RANK", "SLURM_LOCALID"),
        node=number("GROUP_RANK", "SLURM_NODEID"),
        cycle=number(env.CYCLE, "TORCHELASTIC_RESTART_COUNT"),
        run="|".join(environ.get(name, "") for name in _SHARED),
        again=env.REJOIN in environ,
    )
