"""A rank that says what a wrapper would, and in the first cycle never comes to the end of its restart."""

from __future__ import annotations

import os
import time

from ft_client.rank.monitoring import process
from rank_monitor.contract.wire.messages import Restarter

LIMIT_S = 1.0


def say(state: str) -> None:
    """Tells the monitor."""
    link = process.current()
    assert link is not None
    message = Restarter(state, int(os.environ["RANK"]), 0, "by_hand", LIMIT_S)
    assert link.post(message, time.monotonic_ns(), timeout_s=20.0)


if __name__ == "__main__":
    say("initialized")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        say("handling_starting")
        time.sleep(3600)
    say("finalized")
