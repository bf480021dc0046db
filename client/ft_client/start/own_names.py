"""Keeps our modules from hiding modules of the user that have the same name.

A rank has loaded packages of ours before its script begins. The script may have a `rank_monitor.py` beside it, or in a
folder that it puts first into `sys.path`. So ours are removed from `sys.modules`, and `sys.path` decides what the first
import of such a name gets, as in a fresh interpreter: the loaded modules, or what is found there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGES = ("ft_client", "rank_monitor")


def release() -> None:
    """Removes our modules from `sys.modules` until one of them is imported."""
    packages: dict[str, dict[str, ModuleType]] = {}
    for name in list(sys.modules):
        package = name.partition(".")[0]
        if package in _PACKAGES:
            packages.setdefault(package, {})[name] = sys.modules.pop(name)
    if packages:
        sys.meta_path.insert(0, _Finder(packages))


class _Finder(MetaPathFinder):
    """Finds each of the packages once, and removes itself after the last. Modules that are never found still work."""

    def __init__(self, packages: dict[str, dict[str, ModuleType]]) -> None:
        self._packages = packages
        self._hidden: list[dict[str, ModuleType]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        modules = self._packages.pop(fullname, None)
        if modules is None:
            return None
        if not self._packages and self in sys.meta_path:
            sys.meta_path.remove(self)
        package = modules[fullname]
        found = importlib.util.find_spec(fullname)
        if found is not None and not _is_file_of(package, found.origin):
            self._hidden.append(modules)
            return found
        sys.modules.update(modules)
        return ModuleSpec(fullname, _Loaded(package), origin=package.__file__, is_package=True)


class _Loaded(Loader):
    """A loader for a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restores `__spec__`, which the import system has replaced; the module's code is not run again."""
        self._module.__spec__ = self._spec


def _is_file_of(module: ModuleType, origin: str | None) -> bool:
    if origin is None or module.__file__ is None:
        return False
    try:
        return os.path.samefile(origin, module.__file__)  # noqa: PTH121 (text in, text out)
    except OSError:
        return origin == module.__file__
