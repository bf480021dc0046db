"""Calls a function once a module has been imported, without importing it: at once if it is loaded already.

The default timeout of process groups is set so, if the environment of this rank asks for one: torch's names are set
once their module has run, or is given to a fork. A group that is made with a timeout of its own keeps that.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from rank_monitor.contract import env

_CONSTANTS = "torch.distributed.constants"
# It imports the names from there, and so has variables of its own.
_COPIES = "torch.distributed.distributed_c10d"
# The first is for groups made without naming a backend, the second for those of NCCL.
_NAMES = ("default_pg_timeout", "default_pg_nccl_timeout")


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with the module: now if it is loaded, else right after its code has run."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Later(name, action))


def act_on_loaded() -> None:
    """Calls the actions for modules that were put into `sys.modules`, as a fork gets what its zygote has imported."""
    for waiting in [finder for finder in sys.meta_path if isinstance(finder, _Later)]:
        waiting.act_if_loaded()


class _Later(MetaPathFinder):
    """A finder that waits for one module. The usual finders and loader load it; then the action is called."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def act_if_loaded(self) -> None:
        """Calls the action and removes the finder if the module is loaded."""
        if self._name in sys.modules:
            sys.meta_path.remove(self)
            self._action(sys.modules[self._name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, action = spec.loader, self._action

        def exec_module(module: ModuleType) -> None:
            # The loader's own method is in its class; the attribute of the instance hid it.
            del loader.exec_module
            loader.exec_module(module)
            action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def set_collective_timeout() -> None:
    """Sets torch's default timeouts to what the environment of this rank asks for, if anything.

    An invalid value is reported on stderr.
    """
    timeout = _asked_timeout()
    if timeout is not None:
        after_import(_CONSTANTS, lambda module: _replace_defaults(timeout))


def _asked_timeout() -> datetime.timedelta | None:
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


def _replace_defaults(timeout: datetime.timedelta) -> None:
    for module in (_CONSTANTS, _COPIES):
        if module in sys.modules:
            for name in _NAMES:
                setattr(sys.modules[module], name, timeout)
