"""P5: a rank stands still; from its last sign of life to its death, minus the limit."""

from __future__ import annotations

from . import floors
from .job import Job, deaths
from .launchers import NVRX, NVRX_QUICK, Launcher
from .scenario import Outcome, Scenario

LIMITS_S = {"heartbeat": 3.0, "section": 1.5}


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job with the signal that is the default, and one with a signal whose arrival the rank can stamp."""
    for termination in ("SIGKILL", "SIGUSR2"):
        flags = [
            f"--ft-rank-heartbeat-timeout={LIMITS_S['heartbeat']}",
            f"--ft-rank-section-timeouts=work:{LIMITS_S['section']}",
            f"--ft-rank-termination-signal={termination}",
        ]
        arguments = ["hang", *LIMITS_S, str(launcher.check_interval_s)]
        with Job(launcher, ranks, arguments, flags, max_restarts=1) as job:
            for cycle, (kind, limit_s) in enumerate(LIMITS_S.items()):
                (ready,) = job.wait_ranks("ready", cycle)
                (dead,) = deaths([ready.pid]).values()
                (life,) = job.wait_ranks("life", cycle)
                if termination == "SIGKILL":
                    outcome.add(f"{kind}_dead_ms", (dead - life.t) / 1e6 - limit_s * 1000)
                else:
                    (seen,) = job.wait_ranks("signalled", cycle)
                    outcome.add(f"{kind}_signal_ms", (seen.t - life.t) / 1e6 - limit_s * 1000)


def peers(launcher: Launcher) -> list[Launcher]:
    """Launchers with a monitor; NVIDIA's also with a short interval of checks."""
    if launcher is NVRX:
        return [NVRX, NVRX_QUICK]
    return [launcher] if launcher.client else []


SCENARIO = Scenario(
    keys=("P5",),
    title="hang: last sign of life to signal and death, minus the limit",
    marks="signal within 5 ms p99, dead within 30 ms",
    sizes=(1,),
    once=once,
    floor=floors.hang,
    peers=peers,
)
