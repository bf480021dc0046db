"""Calls a function once a module has been imported, without importing it: at once if it is loaded already."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
