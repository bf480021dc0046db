"""In which form a strategy's checkpoint is kept in memory, and which step a checkpoint on disk has."""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch

from ft_client.memory.node_folder import say

_META = "meta.pt"
"""What Lightning writes beside the shards of a distributed checkpoint: all that is no tensor of model or optimizer."""
_WRITES_WHOLE = "Strategy.save_checkpoint"
"""The method of Lightning's base class: rank 0 writes, and each rank has the whole state."""
_WRITES_SHARDS = ("FSDPStrategy.save_checkpoint", "ModelParallelStrategy.save_checkpoint")


FOR_MEMORY = "ft_for_memory"
"""An attribute of what takes the place of a strategy's `save_checkpoint` for a save in memory."""


def is_save_in_memory(trainer: Any) -> bool:
    """Returns whether the checkpoint that a trainer saves now is one for the memory."""
    return hasattr(trainer.strategy.save_checkpoint, FOR_MEMORY)


class SavedForm(Enum):
    """How ranks write a checkpoint."""

    REPLICATED = auto()
    """All ranks have the same: the first rank of each node writes it."""
    SHARDED = auto()
    """By the strategy's own method, in which ranks may wait for each other."""


def saved_form(save_checkpoint: str, has_shards: bool, is_one_node: bool) -> SavedForm | str:
    """Returns how the checkpoint of a strategy is written, or why it is not kept in memory. Pure.

    Args:
        save_checkpoint: the qualified name of the strategy's method.
        has_shards: whether an optimizer has a part of its state on each rank, as ZeroRedundancyOptimizer.
        is_one_node: whether all ranks of the job are on one node.
    """
    if save_checkpoint == _WRITES_WHOLE and not has_shards:
        return SavedForm.REPLICATED
    if save_checkpoint not in (_WRITES_WHOLE, *_WRITES_SHARDS):
        strategy = save_checkpoint.rpartition(".")[0]
        return f"{strategy} is none of the strategies whose checkpoints can lie there"
    if not is_one_node:
        return "on several nodes no node would find all shards of a checkpoint in its own memory"
    return SavedForm.SHARDED


def step_on_disk(path: Path) -> int:
    """Returns the step of a checkpoint of Lightning on disk; 0: there is none, or it cannot be read, which a line says.

    Only what is no tensor is read. As where Lightning loads it, reading runs what its author has put into it.

    `path`: of the checkpoint, or of a folder with several last ones.
    """
    file = path
    if path.is_dir() and not (path / _META).is_file():
        last = sorted(path.glob("last*.ckpt"), key=lambda found: found.stat().st_mtime)
        if not last:
            return 0
        file = last[-1]
    if file.is_dir():
        file = file / _META
    try:
        state: Any = torch.load(file, map_location="meta", mmap=True, weights_only=False)
        return int(state["global_step"])
    except FileNotFoundError:
        return 0
    except Exception as problem:  # of any kind, by what is in the file
        say(f"the step of {file} is not known: {type(problem).__name__}: {problem}")
        return 0
