"""The default timeout of process groups in this rank, where one is asked for: torch's two defaults are replaced.

Imports nothing of torch: where torch is there already (a fork), its names are set; else they are set once its module
has run. A group that is made with a timeout of its own keeps that.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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
        sys.meta_path.insert(0, _Later(timeout))


def _set(module: ModuleType, timeout: datetime.timedelta) -> None:
    for name in _NAMES:
        setattr(module, name, timeout)


class _Later(MetaPathFinder):
    """Waits for the one module; it is found and loaded as ever, and set afterwards."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _CONSTANTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, timeout = spec.loader, self._timeout

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is its own again
            loader.exec_module(module)
            _set(module, timeout)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
