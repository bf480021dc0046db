"""The default timeout of process groups in this rank, where one is asked for: torch's two defaults are replaced.

Imports nothing of torch: where torch is there already (a fork), its names are set; else they are set once its module
has run. A group that is made with a timeout of its own keeps that.
"""

from __future__ import annotations

import datetime
import os
import sys
from types import ModuleType

from ft_client.after_import import after_import
from rank_monitor.contract import env

_CONSTANTS = "torch.distributed.constants"
_COPIES = "torch.distributed.distributed_c10d"  # has the names from there, as its own
_NAMES = ("default_pg_timeout", "default_pg_nccl_timeout")


def apply() -> None:
    """Does what the environment of this rank asks for; what is no limit is said, and left."""
    text = os.environ.get(env.NCCL_COLLECTIVE_TIMEOUT)
    if text is None:
        return
    from rank_monitor.contract import kinds

    try:
        seconds = kinds.LIMIT.read(text)
        timeout = None if seconds is None else datetime.timedelta(seconds=float(str(seconds)))
    except (ValueError, OverflowError) as problem:
        print(f"ft_client: {env.NCCL_COLLECTIVE_TIMEOUT}={text!r} does nothing: {problem}", file=sys.stderr)
        return
    if timeout is None:
        return
    loaded = [sys.modules[name] for name in (_CONSTANTS, _COPIES) if name in sys.modules]
    for module in loaded:
        _set(module, timeout)
    if not loaded:
        after_import(_CONSTANTS, lambda module: _set(module, timeout))


def _set(module: ModuleType, timeout: datetime.timedelta) -> None:
    for name in _NAMES:
        setattr(module, name, timeout)
