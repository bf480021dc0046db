"""P13: the rerun machine when nothing is wrong, and preemption: a step that does nothing but one check of a loss."""

from __future__ import annotations

from . import floors
from .job import Job
from .launchers import OURS, Launcher
from .p13_straggler import took_ns
from .scenario import Outcome, Scenario

STEPS = 2000


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job: the steps of all ranks, and the same with nothing but the check and bare all-reduces."""
    with Job(launcher, ranks, ["rerun", str(STEPS)]) as job:
        job.wait_ranks("timed", deadline_s=120.0)
        for name in ("step", "step_and_stop", "bare_step", "bare_step_and_stop"):
            outcome.add_percentiles(name, [one for rank in range(ranks) for one in took_ns(job, name, rank)])
        outcome.add("step_cpu_us", took_ns(job, "steps_cpu")[0] / STEPS / 1000)


SCENARIO = Scenario(
    keys=("P13",),
    title="rerun machine: a step with one check when nothing is wrong; the same with preemption",
    marks="both (step_and_stop) below 1 % of a 10 ms step: 100 us",
    sizes=(1, 2, 8),
    once=once,
    floor=floors.rerun,
    peers=lambda launcher: [launcher] if launcher is OURS else [],
)
