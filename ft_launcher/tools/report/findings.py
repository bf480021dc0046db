"""Judges the events of a job's journals: its time by category, its faults, and what each fault cost. Pure.

`tools/commands/report.py` and `tools/report/save_intervals.py` call `find`. What it returns is in `job_findings.py`.

A fault is one of three things: what ended a cycle, what ranks restarted in process for, or an attempt that was killed
and followed by another one. Several nodes report the same fault, so first all events of a cycle are put together, over
all journals (`_join`, `_chosen`). Then each fault gets the recovery after it (`_phases`) and the steps that were done
in vain (`_lost`).

Attempts are counted here over all launches: launches that ran at the same time, on several nodes, are one attempt.

An example, two nodes, rank 5 of node 1 fails in cycle 3:

    journal of node 0   `cycle_end` of cycle 3 (another node), a recovery of 12 s before cycle 4
    journal of node 1   `fault` of rank 5, a recovery of 11 s before cycle 4
    one fault           kind and text of the event `fault`; phases of node 1, whose journal knows when the fault began

Ids of launches (`id(launch)`) are used as keys, since two launches may be equal in every field.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft_launcher.record.ledger.account import CUSTOM, Category, CycleTimes, account
from ft_launcher.record.ledger.attempts import account_of, by_attempt
from ft_launcher.tools.report.collection import JOINS, Collection, FaultEntry, Launch
from ft_launcher.tools.report.job_findings import (
    ClassFindings,
    CycleFindings,
    FaultFindings,
    JobFindings,
    Saves,
    SlowRank,
)
from ft_launcher.tools.report.memory_findings import cycle_after, find_memory
from ft_launcher.tools.report.spares import find_spares

_LOOKS_BACK = 16
"""Parts before a restart in which it may have made steps vain. The steps that a fault made vain are in the part just
before, as a rule."""
_SLOWEST = 10
"""Ranks that are listed as slow."""

_BETWEEN_SAVES = (Category.STEP, Category.LOST_PROGRESS, Category.WARMUP, Category.DATA, Category.EVALUATION)
"""What a training does between two checkpoints, beside sections with names of its own."""


def find(collection: Collection) -> JobFindings | None:
    """Returns the findings; None: the journals have no events.

    The launcher calls this before each cycle, too (`--ft-save-interval auto`), in a thread: it must be quick on the
    journals of a long job, and raise nothing on journals that are cut off.
    """
    if not collection.launches:
        return None
    # Journals may have come one after the other, so that launches are not in the order of time.
    launches = sorted(collection.launches, key=lambda launch: launch.since)
    joined = _join(launches)
    merged = account_of(collection.times())
    faults = _faults(joined, sorted(collection.faults, key=lambda event: event.t))
    last = max(launches, key=lambda launch: (joined.attempt(launch), -launch.node_rank))
    cycles = {(joined.attempt(launch), cycle) for launch in launches for cycle in launch.cycles}
    findings: dict[str, Any] = {
        "run_ids": sorted({launch.run_id for launch in launches if launch.run_id}),
        "nodes": sorted({launch.node for launch in launches if launch.node}),
        "node_count": max(len({launch.node for launch in launches}), *map(joined.node_count, cycles), 1),
        "attempts": len(joined.of_attempt),
        "ranks": max((joined.ranks(key) for key in cycles), default=0),
        "began": min(launch.since for launch in launches),
        "ended": max(launch.until for launch in launches),
        "exit_code": last.exit_code,
        "reason": last.reason,
        "wall_s": merged.wall_s,
        "seconds": dict(merged.seconds),
        "goodput": merged.goodput,
        "goodput_saved": merged.goodput_saved,
        "steps": merged.steps,
        "saves": _saves(list(joined.parts.values())),
        "slowest": _slowest(collection),
        "sections": collection.sections.watched(),
        "cycles": _cycles(joined),
        "spares": find_spares(joined.of_attempt),
        "memory": find_memory(joined.of_attempt),
    }
    if faults:
        nodes = Counter(fault.node for fault in faults if fault.node)
        findings |= {
            "faults": faults,
            "classes": _classes(faults, merged.wall_s),
            "mtbf_s": merged.wall_s / len(faults),
            "mttr_s": sum(fault.recovery_s for fault in faults) / len(faults),
            "node_faults": dict(sorted(nodes.items(), key=lambda item: (-item[1], item[0]))),
        }
    return JobFindings(**findings)


_Key = tuple[int, int]
"""Attempt (from 0) and cycle."""


@dataclass(frozen=True)
class _Joined:
    """What all journals of a job tell together.

    Attributes:
        attempts: id of a launch -> its attempt, from 0.
        of_attempt: attempt -> its launches, in the order in which they began.
        recoveries: id of a launch -> its recoveries, each with the cycle that it led into, in the order of cycles.
        parts: cycle -> the part of its lowest node rank, in the order of cycles.
        recovered: the keys of `parts` that a recovery led into.
        sizes: cycle -> how many nodes and ranks took part.
    """

    attempts: Mapping[int, int]
    of_attempt: Mapping[int, Sequence[Launch]]
    recoveries: Mapping[int, Sequence[tuple[int, Mapping[str, float]]]]
    parts: Mapping[_Key, CycleTimes]
    recovered: Sequence[_Key]
    sizes: Mapping[_Key, tuple[int, int]]

    def attempt(self, launch: Launch) -> int:
        """Returns the attempt of a launch."""
        return self.attempts[id(launch)]

    def key(self, event: FaultEntry) -> _Key:
        """Returns the cycle that an event belongs to."""
        return (self.attempt(event.launch), event.cycle)

    def node_count(self, key: _Key) -> int:
        """Returns how many nodes took part in a cycle, as far as their journals are there."""
        return self.sizes.get(key, (0, 0))[0]

    def ranks(self, key: _Key) -> int:
        """Returns how many ranks a cycle had; 0: not known."""
        return self.sizes.get(key, (0, 0))[1]


def _join(launches: Sequence[Launch]) -> _Joined:
    """Puts together what launches tell. `launches` are in the order in which they began."""
    of_attempt = by_attempt(launches)
    attempts = {id(launch): attempt for attempt, found in of_attempt.items() for launch in found}
    recoveries: dict[int, list[tuple[int, Mapping[str, float]]]] = {}
    parts: dict[_Key, CycleTimes] = {}
    # By node rank, so that `setdefault` keeps the part of the lowest one.
    for launch in sorted(launches, key=lambda launch: launch.node_rank):
        of_launch = recoveries.setdefault(id(launch), [])
        for part in launch.parts:
            if part.cycle is not None:
                parts.setdefault((attempts[id(launch)], part.cycle), part)
                if part.recovery:
                    of_launch.append((part.cycle, part.recovery))
        of_launch.sort(key=_cycle_of)
    in_order = {key: parts[key] for key in sorted(parts)}
    sizes: dict[_Key, tuple[int, int]] = {}
    for launch in launches:
        attempt = attempts[id(launch)]
        for number, cycle in launch.cycles.items():
            nodes, ranks = sizes.get((attempt, number), (0, 0))
            sizes[attempt, number] = (nodes + 1, ranks + cycle.ranks)
    recovered = [key for key, part in in_order.items() if part.recovery]
    return _Joined(attempts, of_attempt, recoveries, in_order, recovered, sizes)


def _cycle_of(recovery: tuple[int, Mapping[str, float]]) -> int:
    """Returns the cycle that a recovery led into, the key by which recoveries are searched."""
    return recovery[0]


def _cycles(joined: _Joined) -> list[CycleFindings]:
    """Returns the cycles, each as the lowest node rank has it: the clocks of nodes differ, and one must be chosen."""
    found: dict[_Key, CycleFindings] = {}
    launches = (launch for of_attempt in joined.of_attempt.values() for launch in of_attempt)
    for launch in sorted(launches, key=lambda launch: launch.node_rank):
        attempt = joined.attempt(launch)
        in_order = sorted(launch.cycles.items(), key=lambda item: item[1].began)
        followed_at = [*(cycle.began for _, cycle in in_order[1:]), launch.until]
        # A launch without a cycle leaves one moment over, so the two need not be of equal length.
        for (number, cycle), next_began in zip(in_order, followed_at, strict=False):
            # A cycle without an event about its end ran until the next one, or still runs.
            ended = next_began if cycle.ended is None else cycle.ended
            known = CycleFindings(attempt + 1, number, cycle.began, max(cycle.began, ended), cycle.end_reason)
            found.setdefault((attempt, number), known)
    return [found[key] for key in sorted(found)]


# Faults.


def _faults(joined: _Joined, events: Sequence[FaultEntry]) -> list[FaultFindings]:
    """Returns the faults, in the order of time: those of cycles, and attempts that were killed."""
    by_cycle: dict[_Key, list[FaultEntry]] = {}
    for event in events:
        by_cycle.setdefault(joined.key(event), []).append(event)
    chosen = {key: _chosen(of_cycle) for key, of_cycle in by_cycle.items()}
    lost = _lost(joined, chosen)
    found = []
    for key, of_cycle in chosen.items():
        ranks = joined.ranks(key)
        for event in of_cycle:
            found.append(_fault(event, key, _phases(joined, event), lost.get(id(event), 0.0), ranks))
    last_cycles = dict(joined.parts.keys())  # of each attempt the last one: they are in order
    for attempt, launch, gap_s in _killed_attempts(joined):
        cycle = last_cycles.get(attempt, -1)
        killed = FaultEntry("", launch, launch.until, cycle, "attempt", what="the launcher was killed")
        ranks = joined.ranks((attempt, cycle))
        found.append(_fault(killed, (attempt, cycle), {Category.RESCHEDULE.value: gap_s}, 0.0, ranks))
    return sorted((_with_steps_lost(joined, fault) for fault in found), key=lambda fault: fault.t)


def _with_steps_lost(joined: _Joined, fault: FaultFindings) -> FaultFindings:
    """Returns a fault with the steps that it cost, where the ranks that went on looked for state in memory.

    The ranks say it in the cycle after the fault, which may be the first of the next attempt. A restart in process
    shares its cycle with others: its part is not told apart.
    """
    if fault.in_process:
        return fault
    after = cycle_after(joined.of_attempt, fault.attempt - 1, fault.cycle)
    if after is None or after.first_steps_lost is None:
        return fault
    return replace(fault, steps_lost=after.first_steps_lost, tier=after.tier)


def _fault(event: FaultEntry, key: _Key, phases: Mapping[str, float], lost_s: float, ranks: int) -> FaultFindings:
    """Returns the findings about one fault.

    Args:
        event: the event about it; that of a killed attempt has no name.
        key: its cycle.
        phases: seconds of its recovery.
        lost_s: seconds of steps done in vain.
        ranks: how many ranks the job had; 0: not known.
    """
    recovery_s = sum(phases.values())
    cycle = key[1] if event.event and key[1] >= 0 else None
    return FaultFindings(
        kind=event.kind or "unknown",
        fault_class=event.fault_class or "unknown",
        rank=event.rank,
        node="" if event.kind == "node" else event.launch.node,
        t=event.t,
        attempt=key[0] + 1,
        cycle=cycle,
        in_process=event.event.startswith("in_process"),
        iteration=event.iteration,
        what=event.what,
        hint=event.hint,
        phases=dict(phases),
        recovery_s=recovery_s,
        lost_s=lost_s,
        ranks=ranks,
        rank_s=(recovery_s + lost_s) * ranks,
        detail=event.detail,
        others=event.others,
    )


def _chosen(events: Sequence[FaultEntry]) -> list[FaultEntry]:
    """Returns one event for each fault of a cycle, from all events about faults of that cycle.

    A cycle ends by one fault. Where several nodes report one, that of a rank that failed on its own wins, then the
    first.
    """
    found = _in_process(events)
    ended = [event for event in events if event.event == "fault"]
    on_other_node = [event for event in events if event.event == "cycle_end"]
    # The event of a node that has failed itself says most: of these, a rank that failed on its own comes first.
    if ended:
        found.append(min(ended, key=lambda event: (event.collateral, event.t)))
    elif on_other_node:
        # The node with the fault has left no event about it: the node was lost, or its journal is not among these.
        found.append(replace(on_other_node[0], kind="node"))
    return found


def _in_process(events: Sequence[FaultEntry]) -> list[FaultEntry]:
    """Returns the faults of one cycle that its ranks restarted in process for, one for each restart.

    Every node reports every restart; the longest report counts. A death of a rank before a restart is what the restart
    was for. A death that no restart followed is a fault too, unless the cycle failed.
    """
    found: dict[int, FaultEntry] = {}
    deaths = [event for event in events if event.event == "in_process_fault"]
    for event in events:
        if event.event == "in_process_restart":
            known = found.get(event.iteration)
            if known is None or known.took_s < event.took_s:
                found[event.iteration] = event
    # A restart was for all deaths between the restart before and itself; the first of them gives the facts.
    restarts = []
    for event in sorted(found.values(), key=lambda event: event.t):
        before = [death for death in deaths if death.t <= event.t]
        if before:
            deaths = [death for death in deaths if death.t > event.t]
            restarts.append(_with_death(event, before[0]))
        elif event.kind != JOINS:
            restarts.append(event)
    if not any(event.event == "fault" for event in events):
        restarts += deaths[:1]
    return restarts


def _with_death(restart: FaultEntry, death: FaultEntry) -> FaultEntry:
    """Returns a restart in process joined with the death of the rank that it was for.

    The death says which rank and why; the restart says which round and how long it took.
    """
    return replace(
        death,
        event=restart.event,
        kind=restart.kind or "exit",
        iteration=restart.iteration,
        took_s=restart.took_s,
    )


def _killed_attempts(joined: _Joined) -> list[tuple[int, Launch, float]]:
    """Returns attempts that were killed: no launcher of theirs reported an end, and another attempt followed.

    Each with one of its launches, and the seconds until the next attempt.
    """
    found = []
    for attempt in range(len(joined.of_attempt) - 1):
        of_attempt = joined.of_attempt[attempt]
        if all(launch.exit_code is None for launch in of_attempt):
            last = max(of_attempt, key=lambda launch: launch.until)
            begins = min(launch.since for launch in joined.of_attempt[attempt + 1])
            found.append((attempt, last, begins - last.until))
    return found


def _phases(joined: _Joined, event: FaultEntry) -> Mapping[str, float]:
    """Returns phase -> seconds of the recovery from a fault.

    Asked in this order: the restart in process itself; the journal of the faulty node; the lowest node rank of the next
    cycle; the next attempt.
    """
    # The ranks restarted in process: they measured it themselves, and it is the whole recovery.
    if event.event.startswith("in_process"):
        return {"in_process": event.took_s}
    attempt, cycle = joined.key(event)
    # The journal of the faulty node knows best when its fault began.
    own = joined.recoveries[id(event.launch)]
    place = bisect_right(own, cycle, key=_cycle_of)
    if place < len(own):
        return own[place][1]
    # The node with the fault was lost: any node of the next cycle has the recovery that led into it.
    place = bisect_right(joined.recovered, (attempt, cycle))
    if place < len(joined.recovered) and joined.recovered[place][0] == attempt:
        return joined.parts[joined.recovered[place]].recovery
    # No cycle of this attempt followed. What is known is how long the fault took to be found and the ranks to end, and,
    # where another attempt followed, how long that took to begin.
    phases = {}
    ended = joined.parts.get((attempt, cycle))
    if ended is not None:
        phases = {name: ended.seconds.get(name, 0.0) for name in (Category.DETECTION.value, Category.STOP.value)}
    following = [launch.since for launch in joined.of_attempt.get(attempt + 1, ())]
    if following:
        ended_at = max(launch.until for launch in joined.of_attempt[attempt])
        phases[Category.RESCHEDULE.value] = max(0.0, min(following) - ended_at)
    return phases


def _lost(joined: _Joined, faults: Mapping[_Key, Sequence[FaultEntry]]) -> dict[int, float]:
    """Returns id of a fault's event -> seconds of steps that were done in vain for it.

    Steps that a cycle lost by itself are shared by the faults of that cycle. Steps that turn out lost when a later
    cycle resumes earlier belong to the last fault before it.
    """
    found: dict[int, float] = {}
    keys = list(joined.parts)
    last: FaultEntry | None = None
    for number, key in enumerate(keys):
        # The account of a window of parts knows which steps were done again within it. The parts before this one are
        # counted without it and with it: the difference is what this part made vain in earlier parts.
        window = [joined.parts[known] for known in keys[max(0, number - _LOOKS_BACK) : number + 1]]
        before_s = account(window[:-1]).seconds.get(Category.LOST_PROGRESS, 0.0)
        own_s = window[-1].seconds.get(Category.LOST_PROGRESS, 0.0)
        again_s = max(0.0, account(window).seconds.get(Category.LOST_PROGRESS, 0.0) - before_s - own_s)
        if last is not None:
            found[id(last)] = found.get(id(last), 0.0) + again_s
        of_cycle = faults.get(key, ())
        for event in of_cycle:
            found[id(event)] = found.get(id(event), 0.0) + own_s / len(of_cycle)
        # A restart in process resumes in the same cycle, so only a fault that ended a cycle can make a later cycle
        # resume earlier.
        ended = [event for event in of_cycle if not event.event.startswith("in_process")]
        if ended:
            last = ended[-1]
    return found


def _classes(faults: Sequence[FaultFindings], wall_s: float) -> list[ClassFindings]:
    """Returns what is known of each class of faults, the most frequent first."""
    by_class: dict[str, list[FaultFindings]] = {}
    for fault in faults:
        by_class.setdefault(fault.fault_class, []).append(fault)
    found = [
        ClassFindings(
            name=name,
            faults=len(of_class),
            mtbf_s=wall_s / len(of_class),
            mttr_s=sum(fault.recovery_s for fault in of_class) / len(of_class),
            cost_s=sum(fault.cost_s for fault in of_class),
        )
        for name, of_class in by_class.items()
    ]
    return sorted(found, key=lambda of_class: (-of_class.faults, of_class.name))


# Checkpoints and ranks.


def _saves(parts: Sequence[CycleTimes]) -> Saves | None:
    """Returns what is known of checkpoints; None: no checkpoint was measured.

    Only parts with a save count, so that the time without a save at the begin of a job does not look like a long
    interval. The interval in use is the time of training between two saves, without the saves.
    """
    saving = [part for part in parts if part.saves > 0]
    count = sum(part.saves for part in saving)
    if not count:
        return None
    saving_s = sum(part.seconds.get(Category.CHECKPOINT_SAVE, 0.0) for part in saving)
    trained_s = sum(
        spent_s
        for part in saving
        for name, spent_s in part.seconds.items()
        if name in _BETWEEN_SAVES or name.startswith(CUSTOM)
    )
    return Saves(count, saving_s / count, trained_s / count)


def _slowest(collection: Collection) -> list[SlowRank]:
    """Returns the ranks with the lowest mean scores, the slowest first."""
    found = [SlowRank(rank, score.total / score.reports, score.reports) for rank, score in collection.scores.items()]
    return sorted(found, key=lambda slow: (slow.score, slow.rank))[:_SLOWEST]
