"""The peer's replication strategies, which are refused: they do nothing, and the manager says so in one line.

Megatron-LM makes a `CliqueReplicationStrategy` for `--replication`, and gives it to the manager. The training goes on;
each node keeps its own parts.
"""

from __future__ import annotations

from typing import Any


class NoReplicasAvailableError(Exception):
    """Never raised here. Programs import its name."""


class ReplicationStrategy:
    """A strategy. It makes no replicas: it gives back what this rank has."""

    def replicate(self, local_ckpt: Any, id_: Any) -> tuple[list[Any], list[Any]]:
        """Returns the state and its name, without those of other ranks."""
        return [local_ckpt], [id_]


class CliqueReplicationStrategy(ReplicationStrategy):
    """Stands for the peer's strategy of that name.

    Args:
        local_group: not used.
        target_device: not used.
    """

    def __init__(self, local_group: Any = None, target_device: str = "cpu") -> None:
        self.local_group = local_group
        self.target_device = target_device

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Returns a strategy. Makes no process groups."""
        return cls()


class LazyCliqueReplicationStrategy(ReplicationStrategy):
    """Stands for the peer's strategy of that name.

    Args:
        replication_jump: not used.
        replication_factor: not used.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor
