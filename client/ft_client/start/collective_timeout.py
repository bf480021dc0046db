"""Sets the default timeout of process groups in this rank, if the environment asks for one: replaces torch's defaults.

`bootstrap.py` calls it. It imports nothing of torch: the names are set once their module has run, or is given to a
fork. A group that is made with a timeout of its own keeps that.
"""

from __future__ import annotations

import datetime
import os
import sys

from ft_client.start.after_import import after_import
from rank_monitor.contract import env

_CONSTANTS = "torch.distributed.constants"
# It imports the names from there, and so has variables of its own.
_COPIES = "torch.distributed.distributed_c10d"
# The first is for groups made without naming a backend, the second for those of NCCL.
_NAMES = ("default_pg_timeout", "default_pg_nccl_timeout")


def apply() -> None:
    """Sets the timeout that the environment of this rank asks for. An invalid value is reported on stderr."""
    timeout = _asked_for()
    if timeout is not None:
        after_import(_CONSTANTS, lambda module: _set(timeout))


def _asked_for() -> datetime.timedelta | None:
    text = os.environ.get(env.NCCL_COLLECTIVE_TIMEOUT)
    if text is None:
        return None
    from rank_monitor.contract.settings import kinds

    try:
        seconds = kinds.LIMIT.read(text)
        if seconds is None:
            return None
        return datetime.timedelta(seconds=float(str(seconds)))
    except (ValueError, OverflowError) as problem:
        print(f"ft_client: {env.NCCL_COLLECTIVE_TIMEOUT}={text!r} does nothing: {problem}", file=sys.stderr)
        return None


def _set(timeout: datetime.timedelta) -> None:
    for module in (_CONSTANTS, _COPIES):
        if module in sys.modules:
            for name in _NAMES:
                setattr(sys.modules[module], name, timeout)
