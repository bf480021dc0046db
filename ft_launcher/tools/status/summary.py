"""Says what a job does in one word, in one sentence, and as JSON (`/status.json`). Pure.

`answers.py` calls it for each request; commands and the page show what it returns. `Facts` tell what events say, the
readings what ranks do now, `JobTime` what the time went to. Here they become words, so that command, page and `top` say
the same.

The JSON has a version of its own: keys may be added, and `v` grows when a key goes or changes its meaning.
docs/status.md has the table of keys.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from ft_launcher.record.journal.journal import json_text
from ft_launcher.record.ledger.account import CycleTimes
from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.tools.status import fault_scene, memory_status
from ft_launcher.tools.status.asking import OthersSeen
from ft_launcher.tools.status.fault_scene import innermost
from ft_launcher.tools.status.node_status import Facts, FaultSeen, RankReading
from rank_monitor.contract.settings.config import GROUPS, Settings
from rank_monitor.contract.wire.rank_times import STEP, Durations

VERSION = 1
_DEFAULT = "default"


class JobState(str, Enum):
    """What a job does, as far as this node sees it. The values are those of `state` in `/status.json`."""

    __str__ = str.__str__

    STARTING = "starting"
    """No rank has run yet."""
    RUNNING = "running"
    """Ranks run, and nothing is known to be wrong with them."""
    TROUBLED = "hung"
    """Ranks run, and some stand still: a limit or the stall warning says so."""
    STALLED = "stalled"
    """Ranks run, and have made no steps for much longer than usual. No limit ends them for this."""
    RESTARTING = "restarting"
    """A cycle has ended, and the next has not begun."""
    WAITING = "waiting"
    """This node waits for a place while others run: a spare."""
    ENDED = "ended"
    """The job is over."""


class RankState(str, Enum):
    """What a rank does. The values are those of `state` of a rank in `/status.json`."""

    __str__ = str.__str__

    STARTING = "starting"
    """The rank has not connected to its monitor."""
    UNWATCHED = "unwatched"
    """The rank runs, and has asked for no watch."""
    TRAINING = "training"
    """The rank is watched."""
    STALLED = "stalled"
    """The rank is watched, and the training makes no steps."""
    HUNG = "hung"
    """The rank exceeded a limit, and its monitor ends it."""
    EXITED = "exited"
    """The rank's process has ended."""


def job_state(facts: Facts, times: JobTime | None) -> JobState:
    """Returns what the job does. `times` is None where no time is kept."""
    if facts.ended:
        return JobState.ENDED
    if facts.waits and not facts.runs:
        return JobState.WAITING
    if facts.cycle is None:
        return JobState.STARTING
    if not facts.runs:
        return JobState.RESTARTING
    if facts.trouble:
        return JobState.TROUBLED
    if _is_stalled(facts, times):
        return JobState.STALLED
    return JobState.RUNNING


def _is_stalled(facts: Facts, times: JobTime | None) -> bool:
    """Returns whether ranks run and make no steps, by their time ledgers."""
    return facts.runs and times is not None and times.stall is not None


def _trouble(facts: Facts, times: JobTime | None) -> str:
    """Returns why the job is not well now, in words; empty: nothing is known to be wrong.

    What events say comes first: a condemned rank or a fault explains a stall.
    """
    if facts.trouble or times is None or times.stall is None or not _is_stalled(facts, times):
        return facts.trouble
    if facts.stall_cause:
        return f"{times.stall.text}; {facts.stall_cause}"
    return times.stall.text


def rank_state(reading: RankReading, facts: Facts, times: JobTime | None) -> RankState:
    """Returns what a rank does, from its last reading and from what is known of the whole job."""
    # Readings are of before: what events say of a rank's end is newer.
    if reading.rank in facts.exit_codes or not facts.runs:
        return RankState.EXITED
    if reading.condemned:
        return RankState.HUNG
    if not reading.connected:
        return RankState.STARTING
    if not reading.attached:
        return RankState.UNWATCHED
    if _is_stalled(facts, times):
        return RankState.STALLED
    return RankState.TRAINING


def sentence(facts: Facts, times: JobTime | None) -> str:
    """Returns what the job does and whether it is well, in one line.

    Example: `running, cycle 0, step 1,200, 0.31 s a step, saved 40 s ago at step 1,100, goodput 93.1%`.
    """
    state = job_state(facts, times)
    # What a job does while no rank runs: the category of time that passes now.
    doing = ""
    if times is not None and times.category:
        doing = f" ({times.category})"
    parts = [
        {
            JobState.STARTING: f"starting{doing}",
            JobState.RUNNING: f"running, cycle {facts.cycle}",
            JobState.TROUBLED: f"hung in cycle {facts.cycle}",
            JobState.STALLED: f"stalled in cycle {facts.cycle}",
            JobState.RESTARTING: f"restarting after cycle {facts.cycle}{doing}",
            JobState.WAITING: "waits for a place, as a spare",
            JobState.ENDED: f"ended with exit code {facts.exit_code} ({facts.end_reason})",
        }[state]
    ]
    saved = facts.memory.saved
    if saved is not None and (times is None or times.present.iteration is None):
        parts.append(f"step {saved.reached:,}")  # of a program that reports its steps to the state in memory alone
    if times is not None:
        if times.present.iteration is not None:
            parts.append(f"step {times.present.iteration:,}")
        step_s = typical_step_s(times)
        if step_s is not None:
            parts.append(f"{step_s:.3g} s a step" if step_s >= 0.1 else f"{1000 * step_s:.3g} ms a step")
        if times.present.saved is not None:
            parts.append(f"saved{_ago(times.saved_age_s)} at step {times.present.saved:,}")
    in_memory = memory_status.phrase(facts.memory)
    if in_memory and state is not JobState.ENDED:
        parts.append(in_memory)
    if times is not None and times.account.steps:
        parts.append(f"goodput {times.account.goodput:.1%}")
    if facts.fault_count:
        parts.append(f"{facts.fault_count} fault{'s' if facts.fault_count > 1 else ''}")
    text = ", ".join(parts)
    trouble = _trouble(facts, times)
    if trouble and state is not JobState.ENDED:
        text += f": {trouble}"
    return text


def _ago(age_s: float | None) -> str:
    """Returns ` 40 s ago` for an age of 40; empty where the age is unknown. A checkpoint is known here within 10 s."""
    if age_s is None:
        return ""
    if age_s < 90:
        return f" {age_s:.0f} s ago"
    if age_s < 5400:
        return f" {age_s / 60:.0f} min ago"
    return f" {age_s / 3600:.0f} h ago"


def typical_step_s(times: JobTime) -> float | None:
    """Returns the median time of a step, at most 41 % too high (seconds). None: no step is over.

    The durations are in a histogram whose bounds differ by the square root of 2, hence the error.
    """
    median_ns = times.durations.get(STEP, Durations()).quantile_ns(0.5)
    if median_ns is None:
        return None
    return median_ns / 1e9


def as_json(
    facts: Facts, readings: Sequence[RankReading], times: JobTime | None, now: float, wall: float, version: str
) -> dict[str, Any]:
    """Returns the object of `/status.json`, without the keys about other nodes.

    Args:
        readings: of the ranks of this node.
        times: the job's time; None: no time is kept, and then `times` is null and `cycles` empty.
        now: monotonic seconds, for ages.
        wall: seconds since 1970, the key `t`.
        version: the version of the launcher.
    """
    found: dict[str, Any] = {
        "v": VERSION,
        "t": round(wall, 3),
        "launcher": version,
        "run_id": facts.run_id,
        "job_name": facts.job_name,
        "node": facts.node,
        "node_rank": facts.node_rank,
        "nodes": facts.nodes,
        "state": str(job_state(facts, times)),
        "sentence": sentence(facts, times),
        "trouble": _trouble(facts, times),
        "started": round(facts.started, 3),
        "cycle": facts.cycle,
        "max_restarts": facts.max_restarts,
        "restarts_left": facts.restarts_left,
        "restarts": sum(facts.restarts.values()),
        "steps_lost": 0 if times is None else times.steps_lost,
        "memory": memory_status.as_json(facts.memory),
        "health": dict(facts.health),
        "fault_count": facts.fault_count,
        "faults": [_fault(fault) for fault in facts.faults],
        "ranks": ranks_as_json(facts, readings, times, now),
        "collectives": collectives(readings, now, facts.exit_codes),
        "times": None,
        "cycles": [],
        "exit_code": facts.exit_code,
    }
    if times is not None:
        found["times"] = _times(times)
        found["cycles"] = _cycles(times, facts)
    return found


def ranks_as_json(
    facts: Facts, readings: Sequence[RankReading], times: JobTime | None, now: float
) -> list[dict[str, Any]]:
    """Returns `ranks` of `/status.json`. Other nodes get it, too (`node_record.py`).

    Args:
        now: monotonic seconds, for ages.
    """
    return [_rank(reading, rank_state(reading, facts, times), facts, now) for reading in readings]


def others_as_json(seen: OthersSeen | None) -> dict[str, Any]:
    """Returns the keys about other nodes, which only the coordinator of several nodes has; null elsewhere."""
    if seen is None:
        return {"other_nodes": None, "waiting_nodes": None}
    nodes = [
        {
            "node_rank": node.node_rank,
            "node": node.node,
            "age_s": None if node.age_s is None else round(node.age_s, 3),
            "is_old": node.age_s is not None and node.age_s > seen.old_s,
            "ranks": [_aged(rank, node.age_s or 0.0) for rank in node.ranks],
        }
        for node in seen.nodes
    ]
    return {"other_nodes": nodes, "waiting_nodes": list(seen.waiting)}


def _aged(rank: Mapping[str, Any], age_s: float) -> dict[str, Any]:
    """Returns what a node reported of a rank `age_s` seconds ago, with ages as they are now."""
    ages: dict[str, Any] = {
        key: None if rank[key] is None else round(rank[key] + age_s, 3) for key in ("sign_age_s", "reading_age_s")
    }
    ages["sections"] = {name: round(open_s + age_s, 3) for name, open_s in rank["sections"].items()}
    return {**rank, **ages}


def fault_as_json(fault: FaultSeen) -> dict[str, Any]:
    """Returns the object of `/fault.json`: where the ranks were at a fault. Its lists are empty where nothing hung."""
    found: dict[str, Any] = {"v": VERSION, "number": fault.number, "stacks": [], "collectives": [], "silent": []}
    if fault.scene is not None:
        found |= fault_scene.unpacked(fault.scene)
    return found


def settings_as_json(settings: Settings, sources: Mapping[str, str]) -> dict[str, Any]:
    """Returns the object of `/settings.json`: each setting with its value and its source."""
    found = [
        {
            "key": key.name,
            "value": getattr(getattr(settings, group), key.name),
            "source": sources.get(key.name, _DEFAULT),
        }
        for group, kind in GROUPS.items()
        for key in fields(kind)
    ]
    return {"v": VERSION, "settings": found}


def collectives(readings: Sequence[RankReading], now: float, exited: Container[int] = ()) -> dict[str, Any] | None:
    """Returns how far the ranks are in each process group: `rows`, `silent`, and `age_s` of the oldest answer.

    None: nobody has asked in this cycle.

    Args:
        now: monotonic seconds.
        exited: ranks that have ended, of which no answer is expected.
    """
    moments = [reading.groups_at for reading in readings if reading.groups_at is not None]
    if not moments:
        return None
    ranks = [
        {"rank": reading.rank, "groups": reading.groups, "process": reading.process}
        for reading in readings
        if reading.rank not in exited
    ]
    rows, silent = fault_scene.collectives(ranks), fault_scene.silent(ranks)
    return {"age_s": round(max(0.0, now - min(moments)), 3), "rows": rows, "silent": silent}


def encoded(found: Mapping[str, Any]) -> bytes:
    """Returns JSON as bytes. Numbers that JSON does not have (nan, infinity) become null."""
    return json_text(found).encode()  # it is ASCII: halves of surrogate pairs, which UTF-8 lacks, are escaped


def _rank(reading: RankReading, state: RankState, facts: Facts, now: float) -> dict[str, Any]:
    """Returns one entry of `ranks`. Frames are those of the reading, else of the last finding about the rank."""
    age_s = None
    if reading.read_at is not None:
        age_s = round(max(0.0, now - reading.read_at), 3)
    sign_age_s = None
    if reading.sign_age_s is not None and age_s is not None:
        sign_age_s = round(reading.sign_age_s + age_s, 3)
    return {
        "rank": reading.rank,
        "local_rank": reading.local_rank,
        "pid": reading.pid,
        "state": str(state),
        "exit_code": facts.exit_codes.get(reading.rank),
        "iteration": None if reading.iteration < 0 else reading.iteration,
        "sections": {str(name)[:128]: age for name, age in reading.sections.items()},
        "sign_age_s": sign_age_s,
        "reading_age_s": age_s,
        "frames": innermost(reading.frames) or facts.frames.get(reading.rank, []),
    }


def _fault(fault: FaultSeen) -> dict[str, Any]:
    """Returns one entry of `faults`: all that is known but the scene, which `/fault.json` has."""
    found = {key.name: getattr(fault, key.name) for key in fields(fault) if key.name != "scene"}
    return found | {"has_stacks": fault.scene is not None}


def _cycles(times: JobTime, facts: Facts) -> list[dict[str, Any]]:
    """Returns `cycles`: the last cycles that are over, then the present one."""
    found = [_cycle(part, facts.ends.get(part.cycle, "")) for part in times.past if part.cycle is not None]
    if times.present.cycle is not None:
        found.append(_cycle(times.present, ""))
    return found


def _cycle(part: CycleTimes, end_reason: str) -> dict[str, Any]:
    """Returns one entry of `cycles`. `end_reason` is empty while the cycle runs."""
    return {
        "cycle": part.cycle,
        "since": round(part.since, 3),
        "until": round(part.until, 3),
        "how": end_reason,
        "steps": part.steps,
        "seconds": _rounded(part.seconds),
        "recovery": _rounded(part.recovery),
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns durations in whole milliseconds, without those that are 0."""
    found = {name: round(spent_s, 3) for name, spent_s in seconds.items()}
    return {name: spent_s for name, spent_s in found.items() if spent_s}


def _times(times: JobTime) -> dict[str, Any]:
    """Returns `times`."""
    return {
        "doing": times.category,
        "iteration": times.present.iteration,
        "saved": times.present.saved,
        "saved_age_s": None if times.saved_age_s is None else round(times.saved_age_s, 3),
        "step_s": typical_step_s(times),
        "steps": times.account.steps,
        "wall_s": round(times.account.wall_s, 3),
        "goodput": round(times.account.goodput, 6),
        "goodput_saved": round(times.account.goodput_saved, 6),
        "seconds": _rounded(times.account.seconds),
        "recovery": {phase: round(spent_s, 3) for phase, spent_s in times.present.recovery.items()},
    }
