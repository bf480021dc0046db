"""The default timeout of process groups in this rank, where one is asked for: torch's two defaults are replaced.

Imports nothing of torch: its names are set once their module has run, or is given back to a fork. A group that is made
with a timeout of its own keeps that.
"""

from __future__ import annotations

import datetime
import os
import sys

from ft_client.after_import import after_import
from rank_monitor.contract import env

_CONSTANTS = "torch.distributed.constants"
_COPIES = "torch.distributed.distributed_c10d"  # has the names from there, as its own
_NAMES = ("default_pg_timeout", "default_pg_nccl_timeout")


def apply() -> None:
    """Does what the environment of this rank asks for; what is no limit is said, and left."""
    timeout = _asked_for()
    if timeout is not None:
        after_import(_CONSTANTS, lambda module: _set(timeout))


def _asked_for() -> datetime.timedelta | None:
    text = os.environ.get(env.NCCL_COLLECTIVE_TIMEOUT)
    if text is None:
        return None
    from rank_monitor.contract import kinds

    try:
        seconds = kinds.LIMIT.read(text)
        return None if seconds is None else datetime.timedelta(seconds=float(str(seconds)))
    except (ValueError, OverflowError) as problem:
        print(f"ft_client: {env.NCCL_COLLECTIVE_TIMEOUT}={text!r} does nothing: {problem}", file=sys.stderr)
        return None


def _set(timeout: datetime.timedelta) -> None:
    for module in (_CONSTANTS, _COPIES):
        if module in sys.modules:
            for name in _NAMES:
                setattr(sys.modules[module], name, timeout)
