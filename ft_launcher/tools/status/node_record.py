"""Writes and reads what one node tells the others about its ranks: records of bounded size in the job's store. Pure.

There are two kinds. `stacks_as_record` says where each rank is, for a request for stacks; `ranks_as_record` has one
short line per rank, for the page. `job_nodes.py` writes them to the store and reads those of other nodes.

A reader trusts a record no more than one of a stranger: a wrong type, a number that is too large or a missing key makes
it no record. Each record has the number of the question that it answers, and the cycle that it is about.
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
"""Of the form of both records. A record of another version is not read."""
MAX_BYTES = 64 * 1024
"""Bytes of a record of stacks: 16 MB for 256 nodes at the very most. Most stacks of a node are equal, and each is in
the record once."""
_LESS = ((32, True), (8, True), (8, False), (1, False))
"""How to make a record smaller: frames of each stack, and whether process groups are included. The first pair that fits
is used."""
_MAX_TEXT = 200
"""Characters of a frame, of a name of a group, and of a reason."""
MAX_OF_RANK = 300
"""Bytes of a line about one rank: 0.6 MB for 2,048 ranks."""
_MAX_NAME = 64
"""Characters of the innermost section and frame in such a line."""
_PLAIN = ("rank", "local_rank", "pid", "state", "exit_code", "iteration", "sign_age_s", "reading_age_s")
"""The values of `ranks` of `/status.json` that a line has as they are."""
_MAX_RANKS = 4096
"""Ranks of a record that are read."""
_MAX_NUMBER = 2**63 - 1
"""Largest whole number that is accepted: 64 bits."""
_Rank = TypeVar("_Rank")
_GROUP_NUMBERS, _GROUP_TEXTS = ("entered", "started", "finished"), ("description", "operation", "shape")


@dataclass(frozen=True)
class NodeRecord(Generic[_Rank]):
    """What a node reports of its ranks.

    Attributes:
        number: the question that it answers.
        cycle: the cycle that the ranks run in.
        ranks: one entry for each rank.
    """

    number: int
    cycle: int
    ranks: tuple[_Rank, ...]


def stacks_as_record(number: int, cycle: int, readings: Sequence[RankReading]) -> str:
    """Returns a record of where these ranks are, and how far in their process groups; equal ranks share one scene.

    Where the record would be larger than `MAX_BYTES`, first outer frames are left out, then process groups, and at last
    ranks.
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
    """Returns what a record of stacks says; None: `text` is no such record.

    Args:
        now: when it was read, which becomes the age of its readings (monotonic seconds).
    """

    def ranks(found: Mapping[str, Any]) -> Sequence[RankReading]:
        readings: list[RankReading] = []
        for scene in _listed(found["scenes"]):
            readings += _readings(scene, _MAX_RANKS - len(readings), now)
        return readings

    return _of_record(text, MAX_BYTES, ranks)


def ranks_as_record(number: int, cycle: int, ranks: Iterable[Mapping[str, Any]]) -> str:
    """Returns a record of `ranks` of `/status.json`, without all but the innermost open section and frame.

    Section and frame are both left out where they would make the line of the rank too long.
    """
    rows = []
    for rank in ranks:
        section, open_s = min(rank["sections"].items(), key=lambda entry: entry[1], default=("", 0.0))
        frame = next(iter(rank["frames"]), "")
        row = [*(rank[key] for key in _PLAIN), section[:_MAX_NAME], round(open_s, 1), str(frame)[:_MAX_NAME]]
        if len(json.dumps(row)) > MAX_OF_RANK:  # letters beyond ASCII take 6 or 12 bytes each
            row[-3:] = ["", 0.0, ""]
        rows.append(row)
    return json.dumps({"v": VERSION, "number": number, "cycle": cycle, "ranks": rows}, separators=(",", ":"))


def ranks_of_record(text: bytes) -> NodeRecord[Mapping[str, Any]] | None:
    """Returns what a record of lines says, each rank as `ranks` of `/status.json` has it; None: `text` is no such
    record."""
    return _of_record(
        text, MAX_OF_RANK * _MAX_RANKS, lambda found: [_rank(row) for row in _listed(found["ranks"])[:_MAX_RANKS]]
    )


def _of_record(
    text: bytes, most: int, ranks: Callable[[Mapping[str, Any]], Sequence[_Rank]]
) -> NodeRecord[_Rank] | None:
    """Returns the record in `text`, or None. `ranks` reads the ranks of its JSON and may raise the errors caught
    here."""
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
    """Returns one line of a record as `ranks` of `/status.json` has it.

    Raises:
        ValueError, TypeError: the line does not fit.
    """
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
    """Returns `value` if it is a list."""
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _whole(value: Any) -> int:
    """Returns `value` if it is a whole number of 64 bits. A bool is none."""
    if type(value) is not int or abs(value) > _MAX_NUMBER:
        raise ValueError("not a whole number of 64 bits")
    return value


def _real(value: Any) -> float:
    """Returns `value` as a float if it is a number. `parse_json` has refused nan and infinity."""
    if type(value) not in (int, float):
        raise ValueError("not a number")
    return float(value)


def _scenes(readings: Sequence[RankReading], most_frames: int, with_groups: bool) -> list[dict[str, Any]]:
    """Returns the scenes of these ranks. Ranks with equal frames, reason and groups share a scene."""
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
    """Returns the state of a process group with bounded texts, as it is written."""
    texts = {key: str(state.get(key, ""))[:_MAX_TEXT] for key in _GROUP_TEXTS}
    return texts | {key: int(state.get(key, 0)) for key in _GROUP_NUMBERS}


def _readings(scene: Mapping[str, Any], most: int, now: float) -> list[RankReading]:
    """Returns a reading for each rank of a scene, at most `most` of them. The readings share the frames and groups."""
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
    """Returns the state of a process group as a record has it. Raises an error where a key is missing or wrong."""
    texts = {key: str(state[key])[:_MAX_TEXT] for key in _GROUP_TEXTS}
    return texts | {key: _whole(state[key]) for key in _GROUP_NUMBERS}


def _encoded(number: int, cycle: int, scenes: Sequence[Mapping[str, Any]]) -> str:
    """Returns a record of stacks as compact JSON, which is ASCII: a character is a byte."""
    return json.dumps({"v": VERSION, "number": number, "cycle": cycle, "scenes": scenes}, separators=(",", ":"))
