"""Does something once a module has been imported, without importing it: at once where it is there already."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with the module, now or right after its code has run for the first time."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Later(name, action))


def act_on_loaded() -> None:
    """Acts on modules that were put into `sys.modules` loaded, as a fork is given what its zygote imported."""
    for waiting in [finder for finder in sys.meta_path if isinstance(finder, _Later)]:
        waiting.act_if_loaded()


class _Later(MetaPathFinder):
    """Waits for the one module; it is found and loaded as ever, and acted on afterwards."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def act_if_loaded(self) -> None:
        """Waits no more where the module is there."""
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
            del loader.exec_module  # the loader is its own again
            loader.exec_module(module)
            action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
