"""Describes where the ranks were at one moment, as JSON values of bounded size. Pure.

A scene has three parts: stacks, with ranks at the same location together; collectives, a table of how far the ranks
were in each process group; and silent ranks, which said nothing where others did. `node_status.py` makes one for each
hang, `summary.py` serves it as `/fault.json`, and `tools/bundle/incident.py` writes it into an incident. `answers.py`
uses the same functions for `/stacks`.

Ranks wrote the frames and the names of groups, and the scene of each of the last faults is kept. So every text and list
is cut.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MAX_STACKS = 32
"""Different stacks of a scene."""
_MAX_FRAMES = 32
"""Frames of one stack: the call that hangs, and its callers."""
_MAX_ROWS = 64
"""Rows of the table of collectives. A rank is in about ten groups, and most ranks are equally far in each."""
_MAX_TEXT = 200
"""Characters of a frame, a name of a group, or a shape."""
_INNERMOST = 8
"""Frames in a line about one rank. Below torch's wrappers they reach the program."""


def scene_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the scene of a fault as `/fault.json` has it: `stacks`, `collectives` and `silent`, each as the function
    of that name (`merged_stacks` for the first) returns it.

    Args:
        ranks: as the journal's event `stacks` has them.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: they do not fit, as in a journal of unknown origin.
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
    """Returns a scene as compressed JSON, for `unpacked`.

    A scene is seldom looked at. Unpacked, the lists of many ranks for 20 faults held 3 MiB of memory, since each was
    made beside objects that were soon freed.
    """
    return zlib.compress(json.dumps(scene).encode())


def unpacked(scene: bytes) -> dict[str, Any]:
    """Returns the JSON values of `packed`."""
    found: dict[str, Any] = json.loads(zlib.decompress(scene))
    return found


def merged_stacks(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns groups of ranks with equal frames, the smallest group first: it is the one to look at.

    A group has `ranks`, and everything else as its first rank has it.

    Args:
        ranks: each with `rank`, `frames` of its main thread (the innermost first), and `process`, whose `stacks` says
            why there are no frames.
    """
    groups: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for rank in ranks:
        reason_none = "" if rank["frames"] else str(rank["process"].get("stacks", ""))
        first = {"ranks": [], **{key: value for key, value in rank.items() if key != "rank"}}
        groups.setdefault((tuple(rank["frames"]), reason_none), first)["ranks"].append(rank["rank"])
    return sorted(groups.values(), key=lambda group: (len(group["ranks"]), group["ranks"]))


def collectives(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns how far the ranks are in each process group, one row for all ranks that are equally far.

    Groups in which a rank waits come first. Within a group the ranks that have entered the fewest collectives come
    first, since the other ranks wait for them. The keys of a row:

    - `group`: the name that the program gave the group, else torch's.
    - `ranks`: which ranks the row is about.
    - `entered`, `finished`: the number of the last collective that they have entered and finished, from 1; 0: none.
    - `operation`, `shape`: the first collective that they have not finished, else the last one; sizes and types of its
      tensors.
    - `started`: the number of the last collective that the GPU has started; 0: unknown, as with gloo.

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
    """Returns the ranks that said nothing of their collectives where other ranks did, in rows of `ranks` and `why`.

    In a hang the other ranks may wait for one of these. Empty where no rank said anything.

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
    """Returns the innermost frames, each of bounded length. `frames` begins with the innermost one."""
    return [str(frame)[:_MAX_TEXT] for frame in frames[:_INNERMOST]]
