"""P13: straggler detection: what an entry of a section costs, and a report, by kinds of kernels and by ranks."""

from __future__ import annotations

import array
import statistics

from . import floors
from .job import Job
from .launchers import OURS, Launcher
from .scenario import Outcome, Scenario

ENTRIES = 20000
KINDS = (10, 100, 400)
REPORTS = 10


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job: the entries of all ranks, and rank 0's reports, which wait for the other ranks'; its CPU time beside."""
    kinds = ",".join(map(str, KINDS))
    with Job(launcher, ranks, ["straggler", str(ENTRIES), kinds, str(REPORTS)]) as job:
        job.wait_ranks("timed", deadline_s=120.0)
        for name in ("section_untimed", "section_timed"):
            outcome.add_percentiles(name, [one for rank in range(ranks) for one in took_ns(job, name, rank)])
        for kind in KINDS:
            first, *reports = (took_ns(job, f"report_{kind}_kinds.{index}")[0] for index in range(REPORTS + 1))
            outcome.add(f"report_{kind}_kinds_ms", statistics.median(reports) / 1e6)
            outcome.add(f"report_{kind}_kinds_first_ms", first / 1e6)
            _, *cpu = took_ns(job, f"report_{kind}_kinds_cpu")
            outcome.add(f"report_{kind}_kinds_cpu_ms", statistics.median(cpu) / 1e6)
            bare = [took_ns(job, f"bare_{kind}_kinds.{index}")[0] for index in range(REPORTS)]
            outcome.add(f"bare_{kind}_kinds_ms", statistics.median(bare) / 1e6)


def took_ns(job: Job, name: str, rank: int = 0) -> array.array[int]:
    """Nanoseconds of each call of one rank."""
    took = array.array("q")
    took.frombytes((job.folder / f"{name}.{rank}.bin").read_bytes())
    return took


SCENARIO = Scenario(
    keys=("P13",),
    title="straggler detection: an entry of a section, and a report with so many kinds of kernels",
    marks="entry that is not timed below 2 us; report at 8 ranks below 20 ms, linear in kinds, not in ranks",
    sizes=(1, 2, 8),
    once=once,
    floor=floors.straggler,
    peers=lambda launcher: [launcher] if launcher is OURS else [],
)
