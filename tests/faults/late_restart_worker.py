"""A rank that reports what a wrapper would, and in the first cycle never comes to the end of its restart."""

from __future__ import annotations

import os
import time

from ft_client.rank.monitoring import process
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.wire.messages import RestartReport

LIMIT_S = 1.0


def say(phase: RestartPhase) -> None:
    """Tells the monitor."""
    link = process.current()
    assert link is not None
    now_ns = time.monotonic_ns()
    report = RestartReport(
        phase=phase,
        round=0,
        began_ns=now_ns,
        is_timed=True,
        soft_timeout_s=60.0,
        hard_timeout_s=90.0,
        grace_s=5.0,
        entry_rank=int(os.environ["RANK"]),
        call_prefix="by_hand",
        limit_s=LIMIT_S,
    )
    assert link.post(report, now_ns, timeout_s=20.0)


if __name__ == "__main__":
    say(RestartPhase.ASSIGNING)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        say(RestartPhase.RECOVERING)
        time.sleep(3600)
    say(RestartPhase.DONE)
