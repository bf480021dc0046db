"""After which steps a framework's callback writes the framework's own checkpoint into `ft.memory_folder`.

As `MemoryCheckpoint.step`, by `--ft-memory-interval`: with `auto` by what a save costs. The ranks agree on the interval
whenever a save is due.

A job may have several trainings, one after the other: folds, or a fine-tuning after a pre-training. The steps of each
begin at 0, so the state of one must not be taken for that of another. A training with a name of its own has folders of
its own. Of several trainings with one name, only the first keeps state and finds it: once it has ended in a process, no
other one of that name does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_client.memory import progress
from ft_client.memory.latest_folder import latest_folder_before_group
from ft_client.memory.memory_folders import memory_folder
from ft_client.memory.node_folder import node_of, ranks_of_node, read_settings_in_group, say_on_rank_0
from ft_client.memory.progress import StepNotes
from ft_client.memory.save_steps import SaveSteps
from ft_client.rank import rng
from ft_client.rank.agreement import group

_ended: set[tuple[str, str]] = set()
"""The trainings that have ended in this process, by name, each with the round in which it has."""
_ANOTHER = "a training of this name has ended in this process; MemoryCheckpoint(training=...) names another"


class FolderSaves:
    """The saves of one training. Does nothing without the launcher, and where a node has no folder.

    Collective: all ranks make it once there is a process group, and call `is_due` after the same steps.

    Args:
        call: what the user calls, for the error.
        start: the step from which the training goes on.
        training: its name; empty: it has none.

    Attributes:
        is_first_of_node: whether this rank writes what is the same for all ranks of the node.

    Raises:
        RuntimeError: the job has several ranks and no process group yet.
    """

    def __init__(self, call: str, start: int, training: str = "") -> None:
        self.is_first_of_node = False
        self._training = training
        self._steps: SaveSteps | None = None
        self._notes = StepNotes()
        self._last = start
        self._began = 0.0
        """When the last save became due (monotonic seconds)."""
        settings = read_settings_in_group(call)
        if settings is None:
            return
        interval = int(group.from_rank0(settings.interval))
        nodes = group.gather_json(node_of(settings.folder, group.rank()))
        self.is_first_of_node = ranks_of_node(nodes, group.rank())[0] == group.rank()
        if not group.min_over_ranks([float((training, _round()) not in _ended)])[0]:
            say_on_rank_0(f"no state is kept in memory: {_ANOTHER}")
        elif group.min_over_ranks([float(bool(settings.folder))])[0]:
            self._steps = SaveSteps(interval, start)
            self._notes = progress.current(settings.folder, group.rank())
        else:
            memory_folder.is_on()  # says why

    @property
    def is_on(self) -> bool:
        """Whether folders may be kept in this training; the same on all ranks."""
        return self._steps is not None

    def is_due(self, step: int) -> bool:
        """Returns whether to save after a step, the same on all ranks. The second call after a step says no."""
        if self._steps is None or step == self._last:
            return False
        self._last = step
        self._notes.reached(step)
        now = time.monotonic()
        if not self._steps.is_due(step, now):
            return False
        self._steps.agree(int(group.max_over_ranks([self._steps.wish])[0]))
        if not memory_folder.is_on(step):
            self._steps.left_out(step)
            return False
        self._began = now
        return True

    @contextmanager
    def folder(self, step: int, is_collective: bool) -> Iterator[Path]:
        """A context for a save that is due: `ft.memory_folder`, whose time is measured. Collective."""
        assert self._steps is not None
        try:
            with memory_folder(step, is_collective, self._training) as path:
                yield path
        finally:
            ended = time.monotonic()
            self._steps.saved(step, self._began, ended, ended - self._began)

    def end(self) -> None:
        """Notes that the training has ended well: what follows in this process is another one."""
        _ended.add((self._training, _round()))


def latest_folder(call: str, newer_than: int, training: str) -> Path | None:
    """Returns the newest folder of a training, as `latest_folder_before_group`; None where a training of this name has
    ended in this process. Collective."""
    if (training, _round()) in _ended:
        return None
    if any(ended_in == _round() for _, ended_in in _ended) and group.is_there():
        for notes in progress.opened.values():
            notes.begins(0)  # the next training has lost no step of the last one
        group.min_over_ranks([0.0])  # no rank reads these before all have written them
    return latest_folder_before_group(call, newer_than, training)


def _round() -> str:
    """Returns what tells a round of a restart in process, in which the program begins anew, from the one before: the
    store in which ranks make their process group."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def must_be_local(path: str) -> str:
    """Returns the path of a checkpoint on disk. Raises ValueError: a remote file system has it, which is not read
    here."""
    if "://" in path:
        raise ValueError(f"newer_than={path!r}: give the step of the newest checkpoint there as a number")
    return path


def random_name(rank: int) -> str:
    """Returns the name of the file with a rank's random numbers in the folder of a step."""
    return f"random_rank-{rank}.json"


def write_random(folder: Path, rank: int) -> None:
    """Writes the state of this rank's random numbers (Python, numpy, torch, the present CUDA device)."""
    (folder / random_name(rank)).write_text(json.dumps(rng.to_json(rng.save())))


def restore_random(folder: Path, rank: int) -> None:
    """Restores what `write_random` wrote; nothing, where there is no such file."""
    file = folder / random_name(rank)
    if file.is_file():
        rng.restore(rng.from_json(json.loads(file.read_text())))
