"""The files of the training's state in memory: where they lie, how they are named, which are complete. Pure.

The launcher of a node owns a folder in a tmpfs, and its ranks write the files in it. So the files survive every rank.
Both sides know only what is written here.

**The launcher** makes the folder (`folder_name`, mode 0700, below `--ft-memory-dir`) before it starts ranks, and
passes it as a `MemoryFiles` record in `env.MEMORY_FILES`. It writes one file in the folder, `OWNER_NAME`, and changes
no other. Between two cycles, when none of its ranks lives, it may remove files; at the end of the job it removes the
folder. A launcher that finds a folder of the same key may adopt it: `complete_steps` of the folder's listing says which
steps are there.

**The ranks** write one file each for a step, mode 0600:

- A file that is being written, or that is free to be used again, is named by `unfinished_name(rank, slot)`. Its content
  means nothing.
- When all its bytes are there and their checksums are known, the rank renames it to `StateFile.name`. A file with such
  a name is whole. Before it is written again, it is renamed back.
- A file's name has the step, the rank, how many ranks the job and this node have, and the series. A *series* is what
  was saved between two calls of `load()`: eight hexadecimal digits that all ranks agree upon in that call. Files of two
  series are never one generation: the same step may have been computed twice, with different results.
- A **generation** is complete on a node when each rank of the node has its file: as many different ranks as the names
  say the node has.
- `LOCK_NAME` is an empty file; a rank holds a lock (`flock`) on it while it makes files or makes them larger.
- `process_lock_name` is an empty file; a process that the launcher started for a rank holds a lock (`fcntl`) on it, so
  that no program which that process starts takes the rank's files.
- `processes/rank_progress.py` names one small file for each rank, which says how far the rank is. It outlives the rank,
  as all files here.
- Parts of local checkpoints (Megatron's) lie in a folder `parts_name(key)`, with a folder for each rank. The key tells
  the checkpoints of one program from those of another. Once all ranks have their parts of an iteration, they make an
  empty file with the name of a `PartsMark` beside that folder, and remove older marks of the same key.
- A folder of a step, for a user's own files (`ft.memory_folder`), has a name by `StateFolder.name`. It is complete
  when it has this name. Until then its name is that with `UNFINISHED` appended, and its content means nothing.

**Marks** are empty files that say which states must not be used, and until when none is saved. The launcher makes them
after a fault that a bad state may have caused (`ft_launcher/decide/policy/bad_state.py`), while none of its ranks
lives. As they lie beside the files, they also hold for a later launcher that adopts the folder.

- `set_aside_name(step)`: generations and folders of this step, and of later ones, are not used: they are of bad state,
  or descend from it. `complete_generations` and `complete_folders` leave them out. The ranks remove the mark when they
  have made those files unfinished, before anything is saved.
- `no_save_name(step)`: nothing is saved before the training has passed this step, at which it failed. The state that is
  loaded then stays the newest one until it has proved good. The next such mark replaces it; once the step is passed, it
  changes nothing.
- `flushed_name(step, series)`: this generation was brought back from shared storage (`rank_monitor/memory_flush.py`).
- `copied_name(step, series)`: this generation was fetched from another node (`rank_monitor/memory_copies.py`).

**Copies** of the states of other nodes lie in folders of their own (`copy_records.py: copies_name`), in which the
ranks of this node do nothing.

All else about a file, its checksums too, is inside: a file with a good name may still be damaged, and only the rank
that loads it finds out. Names that fit none of these forms are not ours.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

FOLDER_PREFIX = "ft_memory_"
"""Begins the name of each job's folder, so that sweeps and users recognise them."""
LOCK_NAME = "lock"
OWNER_NAME = "owner"
"""The launcher's own file (`processes/memory_folder.py`): whose the folder is, and that its launcher lives."""
UNFINISHED = ".unfinished"
"""Ends the name of what is not whole."""
AUTO = 0
"""The interval that the ranks choose themselves, by what a save costs them."""

_STATE_FILE = re.compile(
    r"step-(\d{1,18})_rank-(\d{1,9})-of-(\d{1,9})_node-(\d{1,9})_series-([0-9a-f]{8})\.safetensors", re.ASCII
)
_STATE_FOLDER = re.compile(
    r"step-(\d{1,18})_world-(\d{1,9})_ranks-([0-9a-f]{8})(?:_training-([0-9a-f]{8}))?_series-([0-9a-f]{8})\.folder",
    re.ASCII,
)
_PARTS_MARK = re.compile(r"step-(\d{1,18})_parts-([0-9a-f]{8})\.mark", re.ASCII)
_SET_ASIDE = re.compile(r"set-aside_from-(\d{1,18})", re.ASCII)
_NO_SAVE = re.compile(r"no-save_until-(\d{1,18})", re.ASCII)


class StateTier(str, Enum):
    """Where the state lay from which a training goes on."""

    __str__ = str.__str__

    MEMORY = "memory"
    """In the memory of each rank's own node."""
    BUDDY = "buddy"
    """In a copy that another node had, and now in the memory of each rank's own node."""
    FLUSH = "flush"
    """On shared storage, where the launcher wrote it at the end of an earlier start, and now in memory again."""
    NONE = "none"
    """Nowhere of these: the program loads its own checkpoint, or begins."""


@dataclass(frozen=True)
class MemoryFiles:
    """What the launcher tells its ranks, as JSON in `env.MEMORY_FILES` (`json_record.write_record`).

    Attributes:
        folder: absolute path of this node's folder for the job; it exists when ranks start. Empty: there is none.
        keep: how many complete generations are kept; one more is being written beside them.
        limit: bytes that all files in the folder may have together.
        interval: steps between two saves; AUTO: the ranks choose.
        refused: why there is no folder, in one line for the user. The ranks say it once the training wants to keep
            state in memory: most jobs never do, and need no line about it. Empty where there is no folder either: the
            user wants none, and no line.
    """

    folder: str
    keep: int
    limit: int
    interval: int = AUTO
    refused: str = ""


@dataclass(frozen=True)
class StateFile:
    """The name of a whole file: the state of one rank after one step.

    Attributes:
        step: how many steps the training had done.
        rank: of the rank that wrote it.
        world: how many ranks the job had.
        node_ranks: how many of them the node had.
        series: see above.
    """

    step: int
    rank: int
    world: int
    node_ranks: int
    series: str

    @property
    def name(self) -> str:
        return (
            f"step-{self.step}_rank-{self.rank}-of-{self.world}_node-{self.node_ranks}_series-{self.series}.safetensors"
        )


@dataclass(frozen=True)
class StateFolder:
    """The name of a whole folder of a step. All ranks of a node write into one folder.

    Attributes:
        step, world, series: as in `StateFile`.
        ranks: which ranks the node had, as from `ranks_in_name`.
        training: which of the job's trainings wrote it, as from `training_in_name`; empty: the one without a name.
    """

    step: int
    world: int
    ranks: str
    series: str
    training: str = ""

    @property
    def name(self) -> str:
        training = ""
        if self.training:
            training = f"_training-{self.training}"
        return f"step-{self.step}_world-{self.world}_ranks-{self.ranks}{training}_series-{self.series}.folder"


@dataclass(frozen=True)
class PartsMark:
    """The name of a file that says which local checkpoint is complete on all nodes.

    `step`: the iteration. `key`: see above; eight hexadecimal digits.
    """

    step: int
    key: str

    @property
    def name(self) -> str:
        return f"step-{self.step}_parts-{self.key}.mark"


@dataclass(frozen=True)
class Generation:
    """A step whose files are all there on one node.

    `ranks`: the ranks of the node, ascending.
    """

    step: int
    world: int
    series: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class HeldFiles:
    """The whole files of one step, series and job that a node has, whether all of the node's ranks of then are among
    them or not.

    Attributes:
        step, world, node_ranks, series: as in `StateFile`.
        ranks: whose files these are, ascending.
    """

    step: int
    world: int
    node_ranks: int
    series: str
    ranks: tuple[int, ...]


def ranks_in_name(ranks: Sequence[int]) -> str:
    """Returns what tells the ranks of a node from other ranks in a name: a checksum, since they may be many."""
    return f"{zlib.crc32(repr(list(ranks)).encode()):08x}"


def training_in_name(training: str) -> str:
    """Returns what tells a training from the job's others in a name: a checksum; empty for the one without a name."""
    if not training:
        return ""
    return f"{zlib.crc32(training.encode()):08x}"


def folder_name(key: str) -> str:
    """Returns the name of a job's folder. `key`: tells this job from others; letters, digits, `-`, `_` and `.`."""
    return FOLDER_PREFIX + key


def unfinished_name(rank: int, slot: int) -> str:
    """Returns the name of a rank's file that is not whole. `slot` tells the rank's files from each other."""
    return f"rank-{rank}_slot-{slot}{UNFINISHED}"


def process_lock_name(monitor: str) -> str:
    """Returns the name of the file that the process of a rank locks. `monitor`: the name of its monitor's socket."""
    return f"process-{monitor}.lock"


def set_aside_name(step: int) -> str:
    """Returns the name of the mark by which the states of a step and of later ones are not used."""
    return f"set-aside_from-{step}"


def no_save_name(step: int) -> str:
    """Returns the name of the mark by which nothing is saved until the training has passed a step."""
    return f"no-save_until-{step}"


def flushed_name(step: int, series: str) -> str:
    """Returns the name of the mark that a generation was brought back from shared storage."""
    return f"flushed_step-{step}_series-{series}"


def copied_name(step: int, series: str) -> str:
    """Returns the name of the mark that a generation was fetched from another node."""
    return f"copied_step-{step}_series-{series}"


def set_aside_from(names: Iterable[str]) -> int | None:
    """Returns the step from which on states are not used, by the marks in a listing; None: all may be used."""
    return min(_numbers(_SET_ASIDE, names), default=None)


def no_save_until(names: Iterable[str]) -> int:
    """Returns the step that the training must pass before anything is saved, by the marks in a listing; 0: saves are
    made at once."""
    return max(_numbers(_NO_SAVE, names), default=0)


def _numbers(kind: re.Pattern[str], names: Iterable[str]) -> list[int]:
    """Returns the numbers in those names that are of a kind."""
    return [int(found[1]) for found in map(kind.fullmatch, names) if found is not None]


def state_file(name: str) -> StateFile | None:
    """Returns what the name of a whole file says; None: the name is not one."""
    found = _STATE_FILE.fullmatch(name)
    if found is None:
        return None
    step, rank, world, node_ranks = map(int, found.groups()[:4])
    return StateFile(step, rank, world, node_ranks, found[5])


def state_folder(name: str) -> StateFolder | None:
    """Returns what the name of a whole folder of a step says; None: the name is not one."""
    found = _STATE_FOLDER.fullmatch(name)
    if found is None:
        return None
    return StateFolder(int(found[1]), int(found[2]), found[3], found[5], found[4] or "")


def complete_generations(names: Iterable[str]) -> list[Generation]:
    """Returns the generations that are complete on a node and not set aside, the newest step first.

    A step may be there more than once, in several series; nothing says which of these is newer.

    Args:
        names: the listing of the node's folder, with the marks in it.
    """
    found = [
        Generation(held.step, held.world, held.series, held.ranks)
        for held in held_files(names)
        if len(held.ranks) == held.node_ranks
    ]
    return sorted(found, key=lambda generation: (generation.step, generation.series), reverse=True)


def held_files(names: Iterable[str]) -> list[HeldFiles]:
    """Returns all whole files of a node that are not set aside, the newest step first. A job with another number of
    ranks can use a part of a generation: of a state that is the same on all ranks one file is enough.

    Args:
        names: the listing of the node's folder, with the marks in it.
    """
    names = list(names)
    below = set_aside_from(names)
    ranks: dict[tuple[int, int, int, str], set[int]] = defaultdict(set)
    for name in names:
        file = state_file(name)
        if file is not None and (below is None or file.step < below):
            ranks[file.step, file.world, file.node_ranks, file.series].add(file.rank)
    found = [HeldFiles(*key, tuple(sorted(ranks_of))) for key, ranks_of in ranks.items()]
    return sorted(found, key=lambda held: (held.step, held.series, held.world, held.node_ranks), reverse=True)


def parts_name(key: str) -> str:
    """Returns the name of the folder with the parts of local checkpoints. `key`: see above."""
    return f"parts-{key}"


def parts_marks(names: Iterable[str]) -> list[PartsMark]:
    """Returns the marks of complete local checkpoints that are not set aside, in the listing of a node's folder."""
    names = list(names)
    below = set_aside_from(names)
    found = [PartsMark(int(mark[1]), mark[2]) for mark in map(_PARTS_MARK.fullmatch, names) if mark is not None]
    return [mark for mark in found if below is None or mark.step < below]


def complete_folders(names: Iterable[str]) -> list[StateFolder]:
    """Returns the whole folders of steps in the listing of a node's folder that are not set aside, the newest step
    first."""
    names = list(names)
    below = set_aside_from(names)
    found = [
        folder for folder in map(state_folder, names) if folder is not None and (below is None or folder.step < below)
    ]
    return sorted(found, key=lambda folder: (folder.step, folder.series), reverse=True)


def complete_steps(names: Iterable[str]) -> set[int]:
    """Returns the steps that are complete in the listing of a node's folder, in whatever form. A folder without one is
    of no use to the next start."""
    listing = list(names)
    steps = {generation.step for generation in complete_generations(listing)}
    steps |= {folder.step for folder in complete_folders(listing)}
    return steps | {mark.step for mark in parts_marks(listing)}
