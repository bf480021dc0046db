"""Lines of journals written by hand, as bytes and as a report's findings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from ft_launcher.record.journal_reader import JournalEntry, Problems, merge, parse
from ft_launcher.tools.report.collection import Collection
from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.job_findings import JobFindings

Line = dict[str, Any]


def line(event: str, t: float, **facts: Any) -> Line:
    return {"v": 1, "t": t, "event": event} | facts


def start(t: float, node: str = "a", run_id: str = "job") -> Line:
    return line("job_start", t, run_id=run_id, node=node, command=[], max_restarts=3, nprocs=2)


def begins(t: float, cycle: int, node_rank: int = 0, ranks: int = 2) -> Line:
    return line("cycle_start", t, cycle=cycle, node_rank=node_rank, ranks=[{"rank": rank} for rank in range(ranks)])


def part(cycle: int | None, since: float, until: float, **facts: Any) -> Line:
    """An event `ledger`; what `seconds` does not name is `launch`."""
    seconds = dict(facts.pop("seconds", {}))
    seconds["launch"] = until - since - sum(seconds.values())
    return line("ledger", until, cycle=cycle, since=since, until=until, seconds=seconds, **facts)


def steps(cycle: int, since: float, until: float, first: int, last: int, **facts: Any) -> Line:
    """A part with the steps from `first` to `last`, of one second each."""
    count = last - first + 1
    seconds = {"step": float(count)} | facts.pop("seconds", {})
    points = [[first - 1, 0.0], [last, float(count)]]
    return part(
        cycle, since, until, seconds=seconds, steps=count, resumed=first - 1, iteration=last, points=points, **facts
    )


def durations(times: int, longest_s: float) -> Line:
    """So many occurrences of 0.9 to 1 s each, and one of this length."""
    return {"count": times, "first_s": longest_s, "max_s": longest_s, "buckets": [[32, times - 1]]}


def limits(t: float, learned: Iterable[str] = (), **sections: float | None) -> Line:
    facts = {"initial": None, "subsequent": None, "out_of_section": None, "learned": list(learned), "state": {}}
    return line("limits", t, cycle=0, rank=0, sections=sections, **facts)


def verdict(t: float, cycle: int, limit: str, condemned: bool = True) -> Line:
    return line("verdict", t, cycle=cycle, rank=0, limit=limit, condemned=condemned)


def fault(t: float, cycle: int, rank: int = 1, **facts: Any) -> Line:
    known = {"kind": "signal", "what": "died of SIGKILL", "fault_class": "memory", "iteration": 9, "collateral": False}
    return line("fault", t, cycle=cycle, rank=rank, **(known | facts))


def end(t: float, exit_code: int = 0) -> Line:
    return line("job_end", t, exit_code=exit_code, reason="why")


def as_bytes(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def collected(*journals: list[Line], in_turn: bool = False) -> Collection:
    """What is kept of journals, whose events are taken by their time, or `in_turn`, one journal after the other."""
    entries: Iterable[JournalEntry]
    collection = Collection()
    sources = [
        parse(as_bytes(lines).splitlines(keepends=True), Problems(), str(number))
        for number, lines in enumerate(journals)
    ]
    if in_turn:
        entries = itertools.chain(*sources)
    else:
        entries = merge(sources)
    for entry in entries:
        collection.add(entry)
    return collection


def found(*journals: list[Line]) -> JobFindings:
    findings = find(collected(*journals))
    assert findings is not None
    return findings


RECOVERY = {"detection": 1.0, "stop": 2.0, "backoff": 0.0, "rendezvous": 0.5, "start": 3.0, "first_step": 1.5}

NODE_A = [
    start(100),
    begins(105, 0),
    line("cycle_end", 130, cycle=0, how="failed elsewhere", why="rank 3 failed"),
    steps(0, 100, 131, 0, 9, saves=1, saved=4, saved_s=5.0, seconds={"checkpoint_save": 2.0}),
    begins(135, 1),
    steps(1, 131, 160, 5, 14, recovery=RECOVERY, saves=1, saved=14, saved_s=10.0, seconds={"checkpoint_save": 4.0}),
    part(None, 160, 161),
    end(161, 80),
    start(201),
    begins(205, 0, ranks=4),
    steps(0, 201, 230, 15, 24),
    part(None, 230, 231),
    end(231),
]
"""Two attempts. The first has a fault on the other node, after which steps 5 to 9 are done again."""
NODE_B = [
    start(100, "b"),
    begins(105, 0, 1),
    fault(130, 0, rank=3),
    steps(0, 100, 131, 0, 9),
    begins(135, 1, 1),
    fault(159, 1, rank=2, kind="hang", fault_class="hang"),
    steps(1, 131, 160, 5, 14, recovery=RECOVERY | {"detection": 1.25}),
    part(None, 160, 161),
    end(161, 80),
]
