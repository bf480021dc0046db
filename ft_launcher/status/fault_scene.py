"""Where the ranks of a node were at one moment: those at the same place together, and how far each was in its process
groups. Pure.

Of bounded size, whatever the ranks have written: it is kept for each of the last faults.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

_MOST_STACKS = 32
_MOST_FRAMES = 32
"""Of one stack: the call that hangs, and what called it."""
_MOST_ROWS = 64
"""Of the table of collectives: a rank is in about ten groups, and most ranks are at the same place of each."""
_MOST_TEXT = 200
_INNERMOST = 8
"""Frames for a line about one rank: below torch's wrappers they reach the program."""


class HasStack(Protocol):
    """A rank of which the stack is known, or why it is not (`process["stacks"]`)."""

    @property
    def rank(self) -> int:
        """The global rank."""

    @property
    def frames(self) -> Sequence[str]:
        """Of its main thread, the innermost first."""

    @property
    def process(self) -> Mapping[str, Any]:
        """Its state in /proc."""


_R = TypeVar("_R", bound=HasStack)


@dataclass(frozen=True)
class RankScene:
    """One rank: `place` is one of the words of the journal's event `stacks`."""

    rank: int
    place: str
    frames: Sequence[str]
    process: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveRow:
    """Ranks that have come equally far in one process group.

    Attributes:
        group: the name that the program gave the group, else torch's.
        entered: number of the last collective that they have entered, from 1; 0: none.
        finished: number of the last one that they have finished.
        operation: name of the first one that they have not finished, else of the last one.
        shape: sizes and types of its tensors.
        started: number of the last one that the GPU has begun; 0: the recorder does not know it (gloo).
    """

    group: str
    ranks: tuple[int, ...]
    entered: int
    finished: int
    operation: str
    shape: str
    started: int = 0


@dataclass(frozen=True)
class FaultScene:
    """All ranks of the node: `stacks` has those at the same place together, the smallest group first."""

    stacks: tuple[tuple[tuple[int, ...], RankScene], ...]
    collectives: tuple[CollectiveRow, ...]


def scene_of(ranks: Sequence[Mapping[str, Any]]) -> FaultScene:
    """Returns the scene of a fault, of what the journal's event `stacks` has of the ranks."""
    scenes = [
        RankScene(
            int(rank["rank"]),
            str(rank.get("place", "")),
            [str(frame)[:_MOST_TEXT] for frame in rank["frames"][:_MOST_FRAMES]],
            {"stacks": str(rank.get("process", {}).get("stacks", ""))[:_MOST_TEXT]},
        )
        for rank in ranks
    ]
    stacks = [(tuple(found), first) for found, first in merged_stacks(scenes)[:_MOST_STACKS]]
    return FaultScene(tuple(stacks), collectives(ranks))


def packed(scene: FaultScene) -> bytes:
    """Returns a scene as compressed JSON, as `/fault.json` has it. Seldom is one looked at, and the lists of many ranks
    for 20 faults, each made beside what is gone soon, held 3 MiB of memory."""
    stacks = [
        {"ranks": ranks, "place": first.place, "frames": first.frames, "process": first.process}
        for ranks, first in scene.stacks
    ]
    rows = [asdict(row) for row in scene.collectives]
    return zlib.compress(json.dumps({"stacks": stacks, "collectives": rows}).encode())


def unpacked(scene: bytes) -> dict[str, Any]:
    """Returns the JSON values of `packed`."""
    found: dict[str, Any] = json.loads(zlib.decompress(scene))
    return found


def merged_stacks(ranks: Iterable[_R]) -> list[tuple[list[int], _R]]:
    """Returns the ranks with equal frames together, each with the first of them. The smallest group comes first: it is
    the one to look at."""
    groups: dict[tuple[tuple[str, ...], str], list[_R]] = {}
    for rank in ranks:
        why_none = "" if rank.frames else str(rank.process.get("stacks", ""))
        groups.setdefault((tuple(rank.frames), why_none), []).append(rank)
    found = [([rank.rank for rank in group], group[0]) for group in groups.values()]
    return sorted(found, key=lambda entry: (len(entry[0]), entry[0]))


def collectives(ranks: Iterable[Mapping[str, Any]]) -> tuple[CollectiveRow, ...]:
    """Returns how far the ranks are in each process group: groups in which a rank waits first, and of each group those
    first that have entered the fewest collectives, since the others wait for them."""
    rows: dict[tuple[str, int, int, str, str, int], list[int]] = {}
    names: dict[str, str] = {}
    for rank in ranks:
        for name, state in rank.get("groups", {}).items():
            names.setdefault(name, str(state.get("description") or name)[:_MOST_TEXT])
            operation, shape = (str(state.get(key, ""))[:_MOST_TEXT] for key in ("operation", "shape"))
            entered, finished, started = (int(state.get(key, 0)) for key in ("entered", "finished", "started"))
            rows.setdefault((name, entered, finished, operation, shape, started), []).append(int(rank["rank"]))
    waits = {name for name, entered, finished, *_ in rows if entered > finished}
    ordered = sorted(rows.items(), key=lambda row: (row[0][0] not in waits, row[0]))
    return tuple(
        CollectiveRow(names[name], tuple(found), entered, finished, operation, shape, started)
        for (name, entered, finished, operation, shape, started), found in ordered[:_MOST_ROWS]
    )


def innermost(frames: Sequence[str]) -> list[str]:
    """Returns the innermost frames, each of bounded length."""
    return [str(frame)[:_MOST_TEXT] for frame in frames[:_INNERMOST]]
