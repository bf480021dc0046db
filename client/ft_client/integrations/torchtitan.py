"""State in memory for torchtitan: `MemoryCheckpointManager`, in the place of torchtitan's `CheckpointManager`.

torchtitan's manager writes checkpoints to disk as before. Beside them `ft.MemoryCheckpoint` keeps the same objects in
the node's memory: model parts, optimizers, schedulers, loader, and what the trainer adds (its step and tokens seen). No
other file imports `torchtitan`.

Overrides the manager's `_load` and `_save`, which torchtitan means to be overridden, and calls its underscored
`_find_load_step`: no other method says which step is the newest on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager

from ft_client.memory.memory_checkpoint import MemoryCheckpoint
from ft_client.memory.node_folder import say_on_rank_0


class MemoryCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's manager, with the state in memory besides. Without the launcher it is torchtitan's.

    A fault costs the steps since the last save in memory. `load` gives back the newest state: that in memory, if it is
    newer than the newest checkpoint on disk. A load of one step that the user names (`load_step`) is from disk, and no
    state is kept in memory then.

    Example, in the file with a training's configuration:

        config.checkpoint = MemoryCheckpointManager.Config(enable=True, interval=5000, memory_interval=10)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        memory_interval: int | None = None
        """Steps between two saves in memory, in the place of `--ft-memory-interval` of the launcher. None: that
        holds."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.memory_interval is not None and self.memory_interval < 1:
                raise ValueError(f"memory_interval={self.memory_interval}: the number of steps must be 1 or more")

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._memory_interval = config.memory_interval
        self._in_memory: MemoryCheckpoint | None = None
        """None: nothing is kept."""

    def _load(self, step: int = -1) -> bool:
        self._in_memory = None
        if step != -1 or self.load_only:
            say_on_rank_0("no state is kept in memory: torchtitan loads a step that was named, or saves nothing")
            return bool(super()._load(step))
        # The loader may be None. What is not to be loaded is to begin anew.
        kept = {
            name: part
            for name, part in self.states.items()
            if part is not None and name not in self.exclude_from_loading
        }
        in_memory = MemoryCheckpoint(interval=self._memory_interval, **kept)
        found = in_memory.load(newer_than=max(0, self._find_load_step()))
        self._in_memory = in_memory
        return bool(found) or bool(super()._load(step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._in_memory is not None:
            self._in_memory.step(curr_step)
        return bool(super()._save(curr_step, last_step))
