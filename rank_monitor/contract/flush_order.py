"""What the launcher asks `rank_monitor/memory_flush.py` to do with a job's state on shared storage. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

WRITE, BRING_BACK, REMOVE = "write", "bring back", "remove"


@dataclass(frozen=True)
class FlushOrder:
    """What is to be done.

    Attributes:
        work: WRITE, BRING_BACK or REMOVE.
        storage: the folder of `--ft-memory-flush`.
        memory: the job's folder in memory.
        name: of the job's folder on the storage.
        uid: of the user.
        command: tells the command of the job from others.
        host: the name of this machine.
        world: how many ranks the job has.
        ranks: of this node.
        limit: bytes that all files in memory may have.
        below: states of this step and later ones, of these ranks, are set aside; 0: none is.
    """

    work: str
    storage: str
    memory: str
    name: str
    uid: int
    command: str
    host: str = ""
    world: int = 0
    ranks: list[int] = field(default_factory=list)
    limit: int = 0
    below: int = 0


@dataclass(frozen=True)
class FlushResult:
    """What became of it.

    Attributes:
        step: of the newest state that was written, or brought back; None: none was.
        size: its bytes.
        reason: why none was, or with `step` why no newer one was brought back, with numbers; empty: there was none.
        age_s: how long ago the state was written.
        host: where.
    """

    step: int | None = None
    size: int = 0
    reason: str = ""
    age_s: float = 0.0
    host: str = ""
