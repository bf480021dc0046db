"""After which steps a framework's callback writes the framework's own checkpoint into `ft.memory_folder`.

As `MemoryCheckpoint.step`, by `--ft-memory-interval`: with `auto` by what a save costs. The ranks agree on the interval
whenever a save is due.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ft_client.memory import progress
from ft_client.memory.memory_folders import memory_folder
from ft_client.memory.node_folder import read_settings_in_group
from ft_client.memory.progress import StepNotes
from ft_client.memory.save_steps import SaveSteps
from ft_client.rank import rng
from ft_client.rank.agreement import group


class FolderSaves:
    """The saves of one training. Does nothing without the launcher, and where a node has no folder.

    Collective: all ranks make it once there is a process group, and call `is_due` after the same steps.

    Args:
        call: what the user calls, for the error.
        start: the step from which the training goes on.

    Raises:
        RuntimeError: the job has several ranks and no process group yet.
    """

    def __init__(self, call: str, start: int) -> None:
        self._steps: SaveSteps | None = None
        self._notes = StepNotes()
        self._last = start
        self._began = 0.0
        """When the last save became due (monotonic seconds)."""
        settings = read_settings_in_group(call)
        if settings is None:
            return
        interval = int(group.from_rank0(settings.interval))
        if group.min_over_ranks([float(bool(settings.folder))])[0]:
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
        """The block of a save that is due: `ft.memory_folder`, whose time is measured. Collective."""
        assert self._steps is not None
        try:
            with memory_folder(step, is_collective) as path:
                yield path
        finally:
            ended = time.monotonic()
            self._steps.saved(step, self._began, ended, ended - self._began)


def is_first_of_node(local_rank: str | None) -> bool:
    """Returns whether this rank writes what is the same for all ranks of the node. `local_rank`: LOCAL_RANK."""
    return local_rank in (None, "0")


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
