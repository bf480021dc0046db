"""Where the ranks of a node were at one moment: those at the same place together, and how far each was in its process
groups, as JSON values. Pure.

Of bounded size, whatever the ranks have written: it is kept for each of the last faults.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MAX_STACKS = 32
_MAX_FRAMES = 32
"""Of one stack: the call that hangs, and what called it."""
_MAX_ROWS = 64
"""Of the table of collectives: a rank is in about ten groups, and most ranks are at the same place of each."""
_MAX_TEXT = 200
_INNERMOST = 8
"""Frames for a line about one rank: below torch's wrappers they reach the program."""


def scene_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the scene of a fault as `/fault.json` has it: `stacks` (`merged_stacks`), `collectives` and `silent` (see
    there).

    Args:
        ranks: as the journal's event `stacks` has them.
    """
    scenes = [
        {
            "rank": int(rank["rank"]),
            "place": str(rank.get("place", "")),
            "frames": [str(frame)[:_MAX_TEXT] for frame in rank["frames"][:_MAX_FRAMES]],
            "process": {"stacks": str(rank.get("process", {}).get("stacks", ""))[:_MAX_TEXT]},
        }
        for rank in ranks
    ]
    return {
        "stacks": merged_stacks(scenes)[:_MAX_STACKS],
        "collectives": collectives(ranks),
        "silent": silent(ranks),
    }


def packed(scene: Mapping[str, Any]) -> bytes:
    """Returns a scene as compressed JSON. Seldom is one looked at, and the lists of many ranks for 20 faults, each made
    beside what is gone soon, held 3 MiB of memory."""
    return zlib.compress(json.dumps(scene).encode())


def unpacked(scene: bytes) -> dict[str, Any]:
    """Returns the JSON values of `packed`."""
    found: dict[str, Any] = json.loads(zlib.decompress(scene))
    return found


def merged_stacks(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ranks with equal frames together: `ranks`, and all else that is known of the first of them. The
    smallest group comes first: it is the one to look at.

    Args:
        ranks: each with `rank`, `frames` of its main thread (the innermost first), and `process`, whose `stacks` says
            why there are none.
    """
    groups: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for rank in ranks:
        reason_none = "" if rank["frames"] else str(rank["process"].get("stacks", ""))
        first = {"ranks": [], **{key: value for key, value in rank.items() if key != "rank"}}
        groups.setdefault((tuple(rank["frames"]), reason_none), first)["ranks"].append(rank["rank"])
    return sorted(groups.values(), key=lambda group: (len(group["ranks"]), group["ranks"]))


def collectives(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns how far the ranks are in each process group: groups in which a rank waits first, and of each group those
    first that have entered the fewest collectives, since the others wait for them.

    Each row is of the `ranks` that have come equally far in a `group` (the name that the program gave it, else
    torch's): the number of the last collective that they have `entered`, from 1 (0: none), and `finished`; `operation`
    and `shape` (sizes and types of its tensors) of the first one that they have not finished, else of the last one; and
    the number of the last one that the GPU has `started` (0: the recorder does not know it, as with gloo).

    Args:
        ranks: each with `rank` and its `groups`.
    """
    rows: dict[tuple[str, int, int, str, str, int], list[int]] = {}
    names: dict[str, str] = {}
    for rank in ranks:
        for name, state in rank.get("groups", {}).items():
            names.setdefault(name, str(state.get("description") or name)[:_MAX_TEXT])
            operation, shape = (str(state.get(key, ""))[:_MAX_TEXT] for key in ("operation", "shape"))
            entered, finished, started = (int(state.get(key, 0)) for key in ("entered", "finished", "started"))
            rows.setdefault((name, entered, finished, operation, shape, started), []).append(int(rank["rank"]))
    waits = {name for name, entered, finished, *_ in rows if entered > finished}
    ordered = sorted(rows.items(), key=lambda row: (row[0][0] not in waits, row[0]))
    keys = ("entered", "finished", "operation", "shape", "started")
    return [
        {"group": names[name], "ranks": found, **dict(zip(keys, place, strict=True))}
        for (name, *place), found in ordered[:_MAX_ROWS]
    ]


def silent(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ranks that said nothing of their collectives where others did, in rows of `ranks` and `why`.

    In a hang the others may wait for one of them.

    Args:
        ranks: each with `rank`, its `groups`, and its `process` in /proc.
    """
    rows: dict[str, list[int]] = {}
    has_answer = False
    for rank in ranks:
        if rank.get("groups"):
            has_answer = True
        elif rank.get("process", {}).get("stopped"):
            rows.setdefault("no answer, stopped", []).append(int(rank["rank"]))
        else:
            rows.setdefault("no answer", []).append(int(rank["rank"]))
    if not has_answer:
        return []
    return [{"ranks": found, "why": reason} for reason, found in sorted(rows.items())]


def innermost(frames: Sequence[str]) -> list[str]:
    """Returns the innermost frames, each of bounded length."""
    return [str(frame)[:_MAX_TEXT] for frame in frames[:_INNERMOST]]
