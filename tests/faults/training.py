"""The plan of a training with faults, and what it must come to: data and arithmetic only.

Read by the tests and by the rank processes (`worker.py`). Knows no process; a fault is carried out in `injected.py`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPOCHS = 2
PER_EPOCH = 6
ITERATIONS = EPOCHS * PER_EPOCH
CHECKPOINT_EVERY = 3
DDP_STEPS = 6
PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class PlannedFault:
    """One fault, which happens once in a job: `what` happens to `rank` (None: to each) in a place of an iteration.

    `where` is `start` (before the rank is watched), `setup`, `between` (no section is open), `step`, `checkpointing`
    or `end` (after the watch was shut down).
    """

    what: str
    where: str = "step"
    iteration: int = 4
    rank: int | None = None


@dataclass(frozen=True)
class Plan:
    """What the ranks of a job do beside training.

    `children`: kinds of processes each rank starts at the start of each cycle. At SIGTERM ranks end, save and exit 0
    (`saves_on_sigterm`), or write down that it came and go on (`stubborn_ranks`). `hold`: iteration at which ranks
    wait, well and watched, until the file `go` is there.
    """

    faults: tuple[PlannedFault, ...] = ()
    children: tuple[str, ...] = ()
    saves_on_sigterm: bool = False
    stubborn_ranks: tuple[int, ...] = ()
    hold: int | None = None

    def save(self, folder: Path) -> None:
        """Writes the plan where the ranks look for it; the same plan is left as it is, for ranks that read it now."""
        file, text = folder / PLAN_FILE, json.dumps(dataclasses.asdict(self))
        if not file.exists() or file.read_text() != text:
            file.write_text(text)

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """The plan of a job."""
        values = json.loads((folder / PLAN_FILE).read_text())
        values["faults"] = [PlannedFault(**fault) for fault in values["faults"]]
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**fields)


@dataclass
class State:
    """What a rank has learned: how far it is, each sample it saw as (epoch, sample), and a value over their order."""

    iteration: int = 0
    seen: list[tuple[int, int]] = field(default_factory=list)
    value: int = 1

    def take(self, rank: int, world: int) -> None:
        """One iteration."""
        epoch, step = divmod(self.iteration, PER_EPOCH)
        samples = list(range(PER_EPOCH * world))
        random.Random(epoch).shuffle(samples)
        sample = samples[step * world + rank]
        self.seen.append((epoch, sample))
        self.value = (self.value * 1_000_003 + sample) % (1 << 61)
        self.iteration += 1

    @classmethod
    def of_json(cls, text: str) -> State:
        """As saved by `to_json`."""
        values = json.loads(text)
        return cls(values["iteration"], [(epoch, sample) for epoch, sample in values["seen"]], values["value"])

    def to_json(self) -> str:
        """For a checkpoint."""
        return json.dumps(dataclasses.asdict(self))


def fault_free(rank: int, world: int) -> State:
    """The final state of a rank when nothing happens."""
    return after(rank, (ITERATIONS, world))


def after(rank: int, *parts: tuple[int, int]) -> State:
    """The state of a rank after so many iterations each in a world of so many ranks."""
    state = State()
    for iterations, world in parts:
        for _ in range(iterations):
            state.take(rank, world)
    return state


def ddp_weight(world: int) -> float:
    """The weight that the ranks of `ddp_worker.py` come to when nothing happens: down by the mean of the samples."""
    return -sum(range(DDP_STEPS * world)) / world
