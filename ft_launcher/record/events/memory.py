"""Events of the training's state in memory (docs/memory_checkpoint.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.record.events.event import Event, OfCycle
from ft_launcher.record.events.sharing import FreeText, InPartOrText, Shared


@dataclass(frozen=True)
class StateFoundEvent(Event, name="memory_found"):
    """An earlier start of this job, whose launcher was killed, left state in the memory of this node."""

    step: Shared[int | None]
    """The newest step that is complete on this node, which the ranks may load; null: what was left is not taken over,
    and is removed."""
    reason: Shared[str]
    """Why, in words."""
    left: Shared[Mapping[str, Any]]
    """What this was decided by: `steps` that are complete, `age_s` since the launcher was last known to live (null:
    there is no record of it), `is_of_this_boot` of the machine, and `linger_s`, the option `--ft-memory-linger`.
    `ft_launcher replay` decides by it again."""


@dataclass(frozen=True)
class NoStateInMemoryEvent(Event, name="memory_refused"):
    """This node has no folder for the training's state in memory, and the training goes on without."""

    reason: FreeText[str]
    """Why, and what to do."""


@dataclass(frozen=True)
class StateLoadedEvent(OfCycle, Event, name="memory_loaded"):
    """The ranks have looked for state in memory, and the training goes on from what they found. Each node writes it; a
    restart in process is a look of its own."""

    tier: Shared[str]
    """Where the training goes on from, as far as this node's ranks are concerned: `memory`, that of their own node;
    `buddy`, a copy that another node had; `flush`, what an earlier start wrote to `--ft-memory-flush`; `none`: the
    program's checkpoint on disk, or the beginning."""
    step: Shared[int]
    """How many steps the loaded state has; 0: none was loaded."""
    series: Shared[str]
    """With `step`, which generation was loaded: two of one step may be of different series. Empty: none was loaded."""
    newer_than: Shared[int]
    """The step of the checkpoint on disk, as the program says; 0: it named none."""
    reached: Shared[int]
    """The last step that a rank had reported before, by `step()`, a folder of that step or `report_iteration`, which
    numbers the first one 0, or by the log, as `--ft-watch-log` reads it; 0: none had."""
    steps_lost: Shared[int | None]
    """How many steps are computed again: `reached` without the larger of `step` and `newer_than`. Null: not known, as
    no rank had reported a step, or neither a state nor a checkpoint on disk has a step."""
    refused: InPartOrText[Sequence[Mapping[str, Any]]]
    """Generations that were not used, the newest first, at most 16: each `step`, `rank` (-1: it holds for all ranks)
    and `reason`."""
    world: Shared[int] = 0
    """How many ranks the job has; 0: not known, as where a folder of a step was looked for."""
    saved_world: Shared[int] = 0
    """How many ranks the job had that saved the loaded state. Other than `world`: the state was put together for this
    job. 0: none was loaded, or not known."""


@dataclass(frozen=True)
class StatesSavedEvent(OfCycle, Event, name="memory_saved"):
    """What the ranks of this node have kept in memory in a cycle that is over. Written if one of them looked for state
    in it. A restart of the launcher loses it; the files in memory say the same."""

    newest: Shared[int | None]
    """The newest step that is complete on this node; null: none is."""
    reached: Shared[int]
    """The last step that a rank of this node has reported."""
    saves: Shared[int]
    """How many saves each of the ranks has finished, since its process began."""
    failed: Shared[int]
    """How many have failed, on the rank with the most."""
    size: Shared[int]
    """Bytes of the last save, of all ranks of the node."""
    cost_s: Shared[float]
    """For how long the saves have held up the training in all (seconds): that of the slowest rank."""
    first_cost_s: Shared[float]
    """The part of the first save, which also makes the files."""
    share: Shared[float | None]
    """The share of the time that the saves took, without the first one; null: there were fewer than two."""
    in_use: Shared[int]
    """Bytes that all files of the node take."""
    limit: Shared[int]
    """Bytes that they may take (`--ft-memory-limit`)."""
    copied: Shared[int | None] = None
    """The newest step of which each buddy has a copy (`--ft-memory-buddies`); null: of none in this cycle, or no copies
    are wanted."""


@dataclass(frozen=True)
class StateFetchedEvent(OfCycle, Event, name="memory_fetched"):
    """Before the ranks of a cycle started, this node lacked the newest state that the nodes of the cycle have together,
    and was to fetch it (`--ft-memory-buddies`)."""

    step: Shared[int | None]
    """The step that was fetched; null: none was, and the ranks go on from what is left."""
    size: Shared[int]
    """Its bytes, of all ranks of this node."""
    took_s: Shared[float]
    """How long it took (seconds)."""
    peer: FreeText[str]
    """The host name of the node that gave it; empty: this node had the copy itself."""
    reason: FreeText[str]
    """Why none was fetched; empty: one was."""


@dataclass(frozen=True)
class StateNotCopiedEvent(OfCycle, Event, name="memory_not_copied"):
    """The newest state of this node could not be copied to another node. Written once for each reason and node in a
    cycle; the copy is tried again until a newer state is there."""

    step: Shared[int | None]
    """Of the state; null: no state can be copied."""
    peer: FreeText[str]
    """The host name of the other node; empty: it holds for all."""
    reason: FreeText[str]
    """Why not."""


@dataclass(frozen=True)
class StatesCopiedEvent(OfCycle, Event, name="memory_copied"):
    """What this node has copied to another node in a cycle that is over (`--ft-memory-buddies`). Written if it has."""

    peer: FreeText[str]
    """The host name of the other node."""
    newest: Shared[int]
    """The last step that is there."""
    copies: Shared[int]
    """How many states were copied."""
    size: Shared[int]
    """Bytes of the last one."""
    took_s: Shared[float]
    """How long all of them took (seconds)."""


@dataclass(frozen=True)
class StateFlushedEvent(Event, name="memory_flushed"):
    """At the job's end the newest states in memory of this node were to be written to shared storage
    (`--ft-memory-flush`)."""

    step: Shared[int | None]
    """The newest step that was written; null: none was. The one before is written after it, where there is time."""
    size: Shared[int]
    """Its bytes, of all ranks of this node."""
    took_s: Shared[float]
    """How long all of it took (seconds)."""
    reason: FreeText[str]
    """Why none was written; empty: one was."""


@dataclass(frozen=True)
class StateBroughtBackEvent(Event, name="memory_brought_back"):
    """An earlier start of this job had written states of this node's ranks to shared storage."""

    step: Shared[int | None]
    """The newest step that is in memory by this, where the ranks may load it; null: none is."""
    size: Shared[int]
    """Its bytes, of all ranks of this node."""
    reason: FreeText[str]
    """Why none was brought back, or with `step` why no newer one was; empty: there is no reason."""
    age_s: Shared[float]
    """How long ago it was written, by the clock (seconds)."""
    host: FreeText[str]
    """The host name of the machine that wrote it."""
