"""What the ranks of this node keep in memory: read off the names of their files, and off their files of progress.

No rank is asked, so it is known also when all of them are dead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.memory_files import complete_steps
from rank_monitor.contract.processes import rank_progress, tmpfs
from rank_monitor.contract.processes.rank_progress import RankProgress


@dataclass(frozen=True)
class NodeMemory:
    """The state in memory of one node at one moment.

    Attributes:
        newest: the newest step that is complete on this node; None: none is. Whether other nodes have it too, the ranks
            find out in their next `load()`.
        in_use: bytes that all files take.
        limit: bytes that they may take (`--ft-memory-limit`).
        ranks: rank -> how far it is, and what its saves have cost. Empty: no rank has looked for state.
    """

    newest: int | None
    in_use: int
    limit: int
    ranks: Mapping[int, RankProgress]

    @property
    def reached(self) -> int | None:
        """The last step that a rank has reported; None: none has."""
        return max((progress.step for progress in self.ranks.values()), default=None)

    @property
    def saves(self) -> int:
        """How many saves each rank has finished: that of the rank with the fewest."""
        return min((progress.saves for progress in self.ranks.values()), default=0)

    @property
    def failed(self) -> int:
        """How many saves have failed, of the rank with the most."""
        return max((progress.failed for progress in self.ranks.values()), default=0)

    @property
    def size(self) -> int:
        """Bytes of the last save of all ranks of the node together."""
        return sum(progress.size for progress in self.ranks.values())

    @property
    def cost_s(self) -> float:
        """For how long saves have held up the training, with the first one (seconds): that of the slowest rank."""
        costs = [progress.cost_ns + progress.first_cost_ns for progress in self.ranks.values()]
        return max(costs, default=0) / 1e9

    @property
    def first_cost_s(self) -> float:
        """The same of the first save, which also makes the files."""
        return max((progress.first_cost_ns for progress in self.ranks.values()), default=0) / 1e9

    @property
    def share(self) -> float | None:
        """The share of the time that saves took, without the first one: that of the slowest rank; None: not known."""
        shares = [progress.share for progress in self.ranks.values() if progress.share is not None]
        return max(shares, default=None)


def read(folder: Path, limit: int, since_ns: int) -> NodeMemory:
    """Returns the state in a node's folder. Arguments as for `JobFolder.state`.

    Raises:
        OSError: the folder cannot be read.
    """
    names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    steps = complete_steps(names)
    known = rank_progress.read_all(str(folder), names)
    ranks = {rank: progress for rank, progress in sorted(known.items()) if progress.began_ns >= since_ns}
    return NodeMemory(max(steps, default=None), tmpfs.bytes_in(str(folder)), limit, ranks)
