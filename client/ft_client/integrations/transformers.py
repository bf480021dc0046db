"""State in memory for the Trainer of Hugging Face's `transformers`: `MemoryCheckpoint`.

The Trainer decides what a checkpoint is: weights, optimizer, scheduler, the position in the data, the random numbers of
each rank. Its own method makes it; for the time of one save the arguments of the Trainer name the node's folder in
memory as the place, on each node. No other file imports `transformers`.

Uses the Trainer's underscored `_save_checkpoint`: there is no other method that saves more than the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from ft_client.memory.folder_saves import FolderSaves, latest_folder, must_be_local
from ft_client.memory.node_folder import say_on_rank_0

_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
_STATE = "trainer_state.json"
"""What the Trainer writes last into a checkpoint."""
_SAVING = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
"""The methods by which the Trainer saves. Its own have no collectives in the form in which they are called here; those
of a subclass may have."""


class MemoryCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Keeps the state of a Trainer's training in memory, where it outlives the ranks. Without the launcher it does
    nothing.

    Saves are made after optimizer steps, by `--ft-memory-interval`. One that fails never ends the training. Checkpoints
    on disk go on as they were.

    Example:

        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(MemoryCheckpoint(trainer))
        trainer.train(resume_from_checkpoint=MemoryCheckpoint.latest("out") or get_last_checkpoint("out"))

    Args:
        trainer: whose callback this is.
        training: the name of the training, where the job has several, one after the other. Also for `latest`.
    """

    def __init__(self, trainer: Any, training: str = "") -> None:
        self._trainer = trainer
        self._training = training
        self._saves: FolderSaves | None = None

    @staticmethod
    def latest(newer_than: int | str | Path | None = 0, training: str = "") -> str | None:
        """Returns the path of the newest checkpoint in memory that all nodes have, for `resume_from_checkpoint`; None:
        there is none. All ranks call it.

        Args:
            newer_than: the newest checkpoint on disk, which an older one in memory does not replace: its step, its
                folder, or the Trainer's `output_dir`.
            training: the name that the callback has.

        Raises:
            ValueError: `newer_than` is in a remote file system.
            RuntimeError: some ranks do not call it: the error names them. Or the launcher's store does not answer.
        """
        step = 0
        if isinstance(newer_than, (str, Path)):
            step = step_on_disk(Path(must_be_local(str(newer_than))))
        elif newer_than is not None:
            step = newer_than
        folder = latest_folder("MemoryCheckpoint.latest()", step, training)
        if folder is None:
            return None
        return str(next(folder.glob("checkpoint-*"), folder))

    # The Trainer's hooks.

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._saves = None
        saves = FolderSaves("MemoryCheckpoint in train", state.global_step, self._training)
        reason = _why_not(self._trainer)
        if reason:
            if saves.is_on:
                say_on_rank_0(f"no state is kept in memory: {reason}")
            return
        self._saves = saves

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._saves is not None:
            self._saves.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._saves is None or not self._saves.is_due(state.global_step):
            return
        # In the block ranks wait for each other only before the first file is written (`store_flos`): see `_towards`.
        is_collective = any(getattr(type(self._trainer), name) is not getattr(Trainer, name) for name in _SAVING)
        with self._saves.folder(state.global_step, is_collective) as folder, _towards(args, folder), _unchanged(state):
            self._trainer._save_checkpoint(self._trainer.model, trial=None)


def _why_not(trainer: Any) -> str:
    """Returns why the checkpoint of a trainer cannot be kept; empty: it can."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "the Trainer's FSDP and DeepSpeed write shards"
    if (getattr(trainer.model, "tp_size", None) or 1) > 1:
        return "each rank has a part of the model (tensor parallel), and the first one of a node would write it"
    return ""


@contextmanager
def _unchanged(state: Any) -> Iterator[None]:
    """A context in which a save leaves the states of callbacks as they were: the Trainer adds one to a list in each
    save, where several callbacks are of one class."""
    before = state.stateful_callbacks
    state.stateful_callbacks = {name: [*kept] if isinstance(kept, list) else kept for name, kept in before.items()}
    try:
        yield
    finally:
        state.stateful_callbacks = before


@contextmanager
def _towards(args: Any, folder: Path) -> Iterator[None]:
    """A context in which a Trainer saves into a folder, on the first rank of each node, and the whole state.

    `save_strategy` is only asked whether ranks shall wait for each other, to find the best checkpoint on disk.
    """
    changed = {
        "output_dir": str(folder),
        "save_on_each_node": True,
        "save_only_model": False,
        "save_total_limit": None,
        "save_strategy": type(args.save_strategy)("no"),
        "push_to_hub": False,
    }
    before = {name: getattr(args, name) for name in changed}
    for name, value in changed.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def step_on_disk(path: Path) -> int:
    """Returns the step of a checkpoint of the Trainer, or of the newest complete one in a folder; 0: there is none."""
    found = [path]
    if path.is_dir() and _CHECKPOINT.fullmatch(path.name) is None:
        found = list(path.iterdir())
    steps = [_CHECKPOINT.fullmatch(folder.name) for folder in found if (folder / _STATE).is_file()]
    return max((int(step[1]) for step in steps if step is not None), default=0)
