"""What one node writes for the others about its ranks, of bounded size, and how it is read. Pure.

A reader takes a record as a stranger's: whatever is wrong in it, it is no record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ft_launcher.tools.status.node_status import RankReading
from ft_launcher.tools.status.summary import RankState
from rank_monitor.contract.wire.foreign import parse_json

VERSION = 1
MAX_BYTES = 64 * 1024
"""Of one record: 16 MB for 256 nodes at the very most. Most stacks of a node are equal, and are in it once."""
_LESS = ((32, True), (8, True), (8, False), (1, False))
"""Frames of each stack, and whether process groups are in: of the first of these that fits into a record."""
_MAX_TEXT = 200
MAX_OF_RANK = 300
"""Bytes of a record for one rank: 0.6 MB for 2,048 of them."""
_MAX_NAME = 64
_PLAIN = ("rank", "local_rank", "pid", "state", "exit_code", "iteration", "sign_age_s", "reading_age_s")
"""What is written of a rank as `/status.json` has it."""
_MAX_RANKS = 4096
_MAX_NUMBER = 2**63 - 1
_Rank = TypeVar("_Rank")
_GROUP_NUMBERS, _GROUP_TEXTS = ("entered", "started", "finished"), ("description", "operation", "shape")


@dataclass(frozen=True)
class NodeRecord(Generic[_Rank]):
    """What a node says of its ranks in a cycle: the answer to question `number`."""

    number: int
    cycle: int
    ranks: tuple[_Rank, ...]


def stacks_as_record(number: int, cycle: int, readings: Sequence[RankReading]) -> str:
    """Returns a record of where these ranks are and how far in their process groups, those that are equal together.

    Where that is too large for a record, outer frames, then process groups, and at last ranks are left out.
    """
    text = ""
    for most, with_groups in _LESS:
        scenes = _scenes(readings, most, with_groups)
        text = _encoded(number, cycle, scenes)
        if len(text) <= MAX_BYTES:
            return text
    while len(text) > MAX_BYTES:
        scenes = scenes[: len(scenes) // 2]
        text = _encoded(number, cycle, scenes)
    return text


def stacks_of_record(text: bytes, now: float) -> NodeRecord[RankReading] | None:
    """Returns what a record says; None: it is not one.

    Args:
        now: monotonic seconds.
    """

    def ranks(found: Mapping[str, Any]) -> Sequence[RankReading]:
        readings: list[RankReading] = []
        for scene in _listed(found["scenes"]):
            readings += _readings(scene, _MAX_RANKS - len(readings), now)
        return readings

    return _of_record(text, MAX_BYTES, ranks)


def ranks_as_record(number: int, cycle: int, ranks: Iterable[Mapping[str, Any]]) -> str:
    """Returns a record of what `ranks` of `/status.json` says. Of open sections and frames it has the innermost one,
    and neither where they are too long."""
    rows = []
    for rank in ranks:
        section, open_s = min(rank["sections"].items(), key=lambda entry: entry[1], default=("", 0.0))
        frame = next(iter(rank["frames"]), "")
        row = [*(rank[key] for key in _PLAIN), section[:_MAX_NAME], round(open_s, 1), str(frame)[:_MAX_NAME]]
        if len(json.dumps(row)) > MAX_OF_RANK:  # of other letters than those of ASCII
            row[-3:] = ["", 0.0, ""]
        rows.append(row)
    return json.dumps({"v": VERSION, "number": number, "cycle": cycle, "ranks": rows}, separators=(",", ":"))


def ranks_of_record(text: bytes) -> NodeRecord[Mapping[str, Any]] | None:
    """Returns what a record says, of each rank as `ranks` of `/status.json` has it; None: it is not one."""
    return _of_record(
        text, MAX_OF_RANK * _MAX_RANKS, lambda found: [_rank(row) for row in _listed(found["ranks"])[:_MAX_RANKS]]
    )


def _of_record(
    text: bytes, most: int, ranks: Callable[[Mapping[str, Any]], Sequence[_Rank]]
) -> NodeRecord[_Rank] | None:
    if len(text) > most:
        return None
    try:
        found = parse_json(text)
        if found["v"] != VERSION:
            return None
        return NodeRecord(_whole(found["number"]), _whole(found["cycle"]), tuple(ranks(found)))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None


def _rank(row: Sequence[Any]) -> dict[str, Any]:
    *plain, section, open_s, frame = _listed(row)
    found = dict(zip(_PLAIN, plain, strict=True))
    for key in ("rank", "local_rank", "pid"):
        found[key] = _whole(found[key])
    for key in ("exit_code", "iteration"):
        found[key] = None if found[key] is None else _whole(found[key])
    for key in ("sign_age_s", "reading_age_s"):
        found[key] = None if found[key] is None else _real(found[key])
    return found | {
        "state": str(RankState(found["state"])),
        "sections": {str(section)[:_MAX_NAME]: _real(open_s)} if section else {},
        "frames": [str(frame)[:_MAX_NAME]] if frame else [],
    }


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > _MAX_NUMBER:
        raise ValueError("not a whole number of 64 bits")
    return value


def _real(value: Any) -> float:
    """A number; `parse_json` lets none pass that is not finite."""
    if type(value) not in (int, float):
        raise ValueError("not a number")
    return float(value)


def _scenes(readings: Sequence[RankReading], most_frames: int, with_groups: bool) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for reading in readings:
        scene: dict[str, Any] = {
            "frames": [str(frame)[:_MAX_TEXT] for frame in reading.frames[:most_frames]],
            "why": str(reading.process.get("stacks", ""))[:_MAX_TEXT],
            "groups": {},
        }
        if with_groups:
            scene["groups"] = {str(name)[:_MAX_TEXT]: _group(state) for name, state in reading.groups.items()}
        found.setdefault(json.dumps(scene), scene | {"ranks": []})["ranks"].append(reading.rank)
    return list(found.values())


def _group(state: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: str(state.get(key, ""))[:_MAX_TEXT] for key in _GROUP_TEXTS}
    return texts | {key: int(state.get(key, 0)) for key in _GROUP_NUMBERS}


def _readings(scene: Mapping[str, Any], most: int, now: float) -> list[RankReading]:
    """Returns a reading for each rank of a scene, `most` at most. They share what is in it."""
    groups = {str(name)[:_MAX_TEXT]: _group_of_record(state) for name, state in scene["groups"].items()}
    frames = tuple(str(frame)[:_MAX_TEXT] for frame in _listed(scene["frames"])[: _LESS[0][0]])
    process = {"stacks": str(scene["why"])[:_MAX_TEXT]}
    return [
        RankReading(
            _whole(rank),
            local_rank=-1,
            pid=0,
            read_at=now,
            frames=frames,
            process=process,
            groups=groups,
            groups_at=now if groups else None,
        )
        for rank in _listed(scene["ranks"])[:most]
    ]


def _group_of_record(state: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: str(state[key])[:_MAX_TEXT] for key in _GROUP_TEXTS}
    return texts | {key: _whole(state[key]) for key in _GROUP_NUMBERS}


def _encoded(number: int, cycle: int, scenes: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"v": VERSION, "number": number, "cycle": cycle, "scenes": scenes}, separators=(",", ":"))
