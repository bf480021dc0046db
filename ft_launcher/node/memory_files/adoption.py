"""Decides whose folder of state in memory a launcher takes over, and which folders it removes. Pure.

`job_folder.py` reads the facts and acts. A folder is named by the job's key (`job_key`), so that a launcher finds what
an earlier start of the same job left. It takes that over (`adoption`) where a step is complete and the time after the
earlier launcher's death is not over; else the folder begins empty. Folders of other jobs are removed once their time is
over (`is_over`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rank_monitor.contract.memory_files import FOLDER_PREFIX, complete_steps, folder_name
from rank_monitor.contract.processes.memory_folder import Owner, is_aside

MAX_FOLDERS = 64
"""Launchers of one key on one machine that get a folder each. More than a few are a test of several nodes on one
machine."""
_KEY_DIGITS = 16
"""Hexadecimal digits of a key. By 64 bits, two jobs of one user never meet by chance."""


@dataclass(frozen=True)
class LeftBehind:
    """What an earlier start of the job left in its folder, as far as it is decided by.

    Attributes:
        steps: the steps that are complete in the folder.
        age_s: for how long its launcher has been dead, or not been seen (seconds); None: there is no record of it.
        is_of_this_boot: whether the machine has not started again since.
        linger_s: `--ft-memory-linger` of the present start.
    """

    steps: tuple[int, ...]
    age_s: float | None
    is_of_this_boot: bool
    linger_s: float


@dataclass(frozen=True)
class Adoption:
    """Whether a folder is taken over.

    Attributes:
        step: the newest step that is complete in it; None: the folder is not taken over, and begins empty.
        reason: why, in words.
        left: what this was decided by.
    """

    step: int | None
    reason: str
    left: LeftBehind


def job_key(run_id: str, uid: int, folder: str, command: Sequence[str], node_rank: str) -> str:
    """Returns what tells a job from others on this machine, and is the same in each of its starts.

    Args:
        run_id: `--rdzv-id`; empty: the user gave none, and the other arguments tell the job from others.
        uid: of the user.
        folder: the current folder, in which the job is started.
        command: what each rank runs: interpreter, script, arguments.
        node_rank: `--node-rank`, where nodes have numbers from the start: several nodes may be on one machine.
    """
    if run_id:
        facts = [uid, run_id, node_rank]
    else:
        facts = [uid, folder, list(command), node_rank]
    return f"{uid}_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_KEY_DIGITS]}"


def names_for(key: str) -> list[str]:
    """Returns the names of the folders of a key. A launcher takes the first that no other one owns: two jobs with one
    run id at the same time, or two nodes on one machine, have a folder each."""
    more = [f"{key}_{number}" for number in range(1, MAX_FOLDERS)]
    return [folder_name(name) for name in (key, *more)]


def left_behind(owner: Owner | None, names: Collection[str], boot: str, now_s: float, linger_s: float) -> LeftBehind:
    """Returns what `adoption` decides by.

    Args:
        owner: the record of the dead launcher; None: there is none that can be read.
        names: the names in its folder.
        boot: the boot of this machine, as in `Owner`.
        now_s: the time of the records.
        linger_s: `--ft-memory-linger` of this start.
    """
    age_s, is_of_this_boot = None, False
    if owner is not None:
        age_s, is_of_this_boot = round(max(0.0, now_s - owner.seen_s), 3), owner.boot == boot
    return LeftBehind(tuple(sorted(complete_steps(names))), age_s, is_of_this_boot, linger_s)


def adoption(left: LeftBehind) -> Adoption:
    """Returns whether the folder of an earlier start of the same job is taken over."""
    step = None
    if not left.steps:
        reason = "no step was complete in it"
    elif left.age_s is None:
        reason = "its launcher left no record that can be read"
    elif not left.is_of_this_boot:
        reason = "it is of another boot of this machine"
    elif left.linger_s == 0:
        reason = "--ft-memory-linger 0 begins afresh"
    elif left.age_s > left.linger_s:
        reason = f"its launcher died {left.age_s:.0f} s ago, and --ft-memory-linger is {left.linger_s:g} s"
    else:
        step, reason = max(left.steps), f"its launcher died {left.age_s:.1f} s ago"
    return Adoption(step, reason, left)


def is_over(owner: Owner | None, boot: str, now_s: float) -> bool:
    """Returns whether the time of a folder is over whose launcher is dead.

    Args:
        owner: its record; None: there is none, so nobody can take the folder over.
        boot: as for `adoption`.
        now_s: as for `adoption`.
    """
    return owner is None or owner.boot != boot or now_s - owner.seen_s > owner.linger_s


def of_user(names: Collection[str], uid: int) -> tuple[list[str], list[str]]:
    """Returns which of the names in a tmpfs are folders of a user's jobs: those that may be owned, and those whose
    removal has begun."""
    ours = sorted(name for name in names if name.startswith(f"{FOLDER_PREFIX}{uid}_"))
    return [name for name in ours if not is_aside(name)], [name for name in ours if is_aside(name)]
