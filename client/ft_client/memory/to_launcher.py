"""Tells the launcher what a look for state in memory came to."""

from __future__ import annotations

import time

from ft_client.rank.monitoring import process
from rank_monitor.contract.wire.messages import StateLoaded

_SEND_S = 1.0
"""For how long a monitor is waited for that reads nothing. The message is sent once, and what it says is shown by the
launcher alone."""


def tell(message: StateLoaded) -> bool:
    """Sends the message to this rank's monitor, which passes it on. Blocks for up to a second. Returns whether it was
    sent; False also where nobody watches this process."""
    link = process.current()
    return link is not None and link.post(message, time.monotonic_ns(), _SEND_S)
