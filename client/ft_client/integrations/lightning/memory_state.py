"""`MemoryCheckpoint`: Lightning's own checkpoint in the node's memory, beside those of `ModelCheckpoint` on disk.

Lightning decides what a checkpoint is: weights, optimizers, schedulers, loops, callbacks and resumable loaders.
`Trainer.save_checkpoint` makes it here as anywhere; only where it is written is another place, and each node has a file
of its own. Beside it lie the random numbers of each rank, which Lightning does not keep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from ft_client.integrations.lightning.framework import Callback
from ft_client.integrations.lightning.saved_form import FOR_MEMORY, SavedForm, saved_form, step_on_disk
from ft_client.memory.folder_saves import FolderSaves, latest_folder, must_be_local, restore_random, write_random
from ft_client.memory.node_folder import say_on_rank_0

_FILE = "state.ckpt"
_LATEST = "MemoryCheckpoint.latest()"


class MemoryCheckpoint(Callback):
    """Keeps the state of a Lightning training in memory, where it outlives the ranks. Without the launcher it does
    nothing.

    Saves are made after optimizer steps, by `--ft-memory-interval`. One that fails never ends the training, unless the
    strategy writes shards (`ModelParallelStrategy`, `FSDPStrategy`): then it ends the rank, as others may wait for it.

    Example:

        trainer = pl.Trainer(callbacks=[MemoryCheckpoint(), saves])
        trainer.fit(model, ckpt_path=MemoryCheckpoint.latest(newer_than="experiment") or "last")

    Args:
        training: the name of the training, where the job has several, one after the other. Also for `latest`.
    """

    _is_looked_for: ClassVar[bool] = False
    """Whether this process has asked for the newest state."""

    def __init__(self, training: str = "") -> None:
        super().__init__()
        self._training = training
        self._saves: FolderSaves | None = None
        self._form = SavedForm.REPLICATED
        self._is_loaded = False
        """Whether `fit` has loaded a checkpoint, and training has not begun yet."""

    @classmethod
    def latest(cls, newer_than: int | str | Path | None = 0, training: str = "") -> str | None:
        """Returns the path of the newest checkpoint in memory that all nodes have, for `ckpt_path`; None: there is
        none. All ranks call it, also before there is a process group.

        Args:
            newer_than: the newest checkpoint on disk, which an older one in memory does not replace: its step, its
                file, or the folder with Lightning's last ones (`last*.ckpt`), of which the latest is read.
            training: the name that the callback has.

        Raises:
            ValueError: `newer_than` is in a remote file system.
            RuntimeError: some ranks do not call it: the error names them. Or the launcher's store does not answer.
        """
        cls._is_looked_for = True
        step = 0
        if isinstance(newer_than, (str, Path)):
            path = Path(must_be_local(str(newer_than)))
            if os.environ.get("RANK", "0") == "0":  # the largest step of all ranks counts
                step = step_on_disk(path)
        elif newer_than is not None:
            step = newer_than
        folder = latest_folder(_LATEST, step, training)
        if folder is None:
            return None
        return str(folder / _FILE)

    # Lightning's hooks.

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._is_loaded = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._saves = None
        if self._is_loaded and trainer.ckpt_path:
            restore_random(Path(trainer.ckpt_path).parent, trainer.global_rank)
        self._is_loaded = False
        saves = FolderSaves("MemoryCheckpoint in fit", trainer.global_step, self._training)
        is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        has_shards = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)
        form = saved_form(type(trainer.strategy).save_checkpoint.__qualname__, has_shards, is_one_node)
        if isinstance(form, str):
            if saves.is_on:
                say_on_rank_0(f"no state is kept in memory: {form}")
            return
        if saves.is_on and not MemoryCheckpoint._is_looked_for:
            say_on_rank_0(f"state is kept in memory, but fit looks for none: ckpt_path={_LATEST} is missing")
        self._form = form
        self._saves = saves

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        if self._saves is not None and self._saves.is_due(trainer.global_step):
            self._save(trainer, self._saves)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._saves is not None:
            self._saves.end()

    # Within.

    def _save(self, trainer: Any, saves: FolderSaves) -> None:
        """Has Lightning save into a folder in memory. Where a hook of the user's (`on_save_checkpoint`) raises, this
        rank enters the block all the same, and the barrier with which Lightning's `save_checkpoint` ends: the other
        ranks wait in both."""
        is_sharded = self._form is SavedForm.SHARDED
        step, strategy = trainer.global_step, trainer.strategy
        has_begun = False

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            nonlocal has_begun
            has_begun = True
            with saves.folder(step, is_collective=is_sharded) as folder:
                write_random(folder, trainer.global_rank)
                if is_sharded:
                    with _plain_files(strategy):
                        type(strategy).save_checkpoint(strategy, checkpoint, folder / _FILE)
                elif saves.is_first_of_node:
                    torch.save(checkpoint, folder / _FILE)

        setattr(save_checkpoint, FOR_MEMORY, True)
        with _writing(strategy, save_checkpoint):
            try:
                trainer.save_checkpoint(_FILE)
            except Exception as problem:
                if has_begun:
                    raise
                with saves.folder(step, is_collective=is_sharded):
                    _raise(problem)
                strategy.barrier("Trainer.save_checkpoint")


def _raise(problem: Exception) -> None:
    raise problem


@contextmanager
def _writing(strategy: Any, save_checkpoint: Any) -> Iterator[None]:
    """A context in which a strategy saves in another way."""
    of_instance = vars(strategy).get("save_checkpoint")
    strategy.save_checkpoint = save_checkpoint
    try:
        yield
    finally:
        if of_instance is None:
            del strategy.save_checkpoint
        else:
            strategy.save_checkpoint = of_instance


@contextmanager
def _plain_files(strategy: Any) -> Iterator[None]:
    """A context in which a strategy writes at once, also where it saves in the background: a folder is complete when
    its block ends."""
    before = strategy.checkpoint_io
    plain = before
    while hasattr(plain, "checkpoint_io"):  # as of AsyncCheckpointIO: what it writes by
        plain = plain.checkpoint_io
    strategy.checkpoint_io = plain
    try:
        yield
    finally:
        strategy.checkpoint_io = before
