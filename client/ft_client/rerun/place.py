"""Where a rank runs: node and device, by names that stay the same when a job is started again."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """A device of a node."""

    node: str
    device: str

    def is_same(self, other: Place) -> bool:
        """Whether both are one device: a GPU is known by its UUID, whatever its node is called by now."""
        return self.device == other.device and ("-" in self.device or self.node == other.node)

    def __str__(self) -> str:
        return f"node {self.node}, device {self.device}"


def here(node_name: str | None = None) -> Place:
    """The place of this process. A GPU goes by its UUID: its index depends on which GPUs are visible.

    Args:
        node_name: None: the host's name.
    """
    device = "cpu"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        device = f"cuda:{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"
    return Place(node_name or socket.gethostname(), device)
