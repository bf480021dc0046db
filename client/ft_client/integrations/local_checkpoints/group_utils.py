"""`GroupWrapper` and `parse_group_sequence`: helpers for groups of ranks, by the peer's names.

What sends states from rank to rank is not there: nothing is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class GroupWrapper:
    """A process group with the peer's methods.

    Args:
        group: a process group; None: the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @staticmethod
    def wrap(group: Any) -> GroupWrapper:
        """Returns the wrapper of a group, or the wrapper that is given.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(group, GroupWrapper):
            return group
        if isinstance(group, dist.ProcessGroup):
            return GroupWrapper(group)
        raise ValueError(f"{type(group)} is no process group")

    @staticmethod
    def from_list_of_groups(list_of_groups: Sequence[Any]) -> GroupWrapper:
        """Returns the wrapper of the only group of a list that this rank is in.

        Raises:
            AssertionError: it is in none, or in several.
        """
        own = [group for group in list_of_groups if dist.get_rank() in dist.get_process_group_ranks(group)]
        assert len(own) == 1, f"rank {dist.get_rank()} is in {len(own)} of the groups, and must be in one"
        return GroupWrapper(own[0])

    @property
    def group(self) -> Any:
        """The process group; None: the default one."""
        return self._group

    @property
    def backend(self) -> str:
        """The name of the group's backend."""
        return str(dist.get_backend(self._group))

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the group, by their numbers in the job."""
        if self._group is None:
            return range(dist.get_world_size())
        found: list[int] = dist.get_process_group_ranks(self._group)
        return found

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return int(dist.get_world_size(self._group))

    @property
    def my_group_rank(self) -> int:
        """The number of this rank in the group."""
        return self.get_group_rank()

    @property
    def my_global_rank(self) -> int:
        """The number of this rank in the job."""
        return self.get_global_rank()

    def get_group_rank(self, global_rank: int | None = None) -> int:
        """Returns the number in the group of a rank of the job. `global_rank`: None: this rank."""
        if global_rank is None:
            return int(dist.get_rank(self._group))
        if self._group is None:
            return global_rank
        return int(dist.get_group_rank(self._group, global_rank))

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """Returns the number in the job of a rank of the group. `group_rank`: None: this rank."""
        if group_rank is None:
            return int(dist.get_rank())
        if self._group is None:
            return group_rank
        return int(dist.get_global_rank(self._group, group_rank))

    def all_gather_object(self, my_obj: Any) -> list[Any]:
        """Returns what each rank of the group gives, by torch's collective of that name."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, my_obj, group=self._group)
        return found

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.distributed.broadcast`, in the group."""
        return dist.broadcast(*args, **kwargs, group=self._group)

    def all_gather_batch(self, my_tensors: Sequence[Any], target_device: Any = None) -> list[list[Any]]:
        """Returns the tensors of each rank of the group, by rank; each may give others. Collective.

        Args:
            my_tensors: of this rank, on a device that the group's backend serves.
            target_device: where the result lies; None: on the devices of this rank's own tensors' kind.
        """
        shapes = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in my_tensors]
        found = []
        for number, others in enumerate(self.all_gather_object(shapes)):
            tensors = []
            for index, (shape, dtype, device) in enumerate(others):
                if number == self.my_group_rank:
                    tensor = my_tensors[index]
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                self.broadcast(tensor, src=self.get_global_rank(number))
                if target_device is not None:
                    tensor = tensor.to(target_device)
                tensors.append(tensor)
            found.append(tensors)
        return found


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[tuple[int, ...]]:
    """Returns groups of ranks: each has `replication_factor` ranks, `replication_jump` apart.

    Raises:
        AssertionError: the ranks do not divide into such groups.
    """
    assert replication_jump > 0, "replication_jump must be 1 or more: a rank is no replica of itself"
    assert replication_factor > 0, "replication_factor must be 1 or more"
    block = replication_jump * replication_factor
    assert world_size % block == 0, f"{world_size} ranks cannot be split into replication groups of {block} ranks"
    return [
        tuple(range(start, start + block, replication_jump))
        for first in range(0, world_size, block)
        for start in range(first, first + replication_jump)
    ]
