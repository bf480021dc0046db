"""Finds which modules of installed packages a rank's program has imported after torch, and which variables of the
environment have changed. Pure.

By that the launcher can import the same before it forks the ranks of the next cycle, so that these start faster.
`watchdog.py` asks for both, once, in the one rank of a node that the launcher has chosen for it, and sends them
(`ModulesImported`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import ModuleType
from typing import TypeVar

from rank_monitor.contract.installed import is_installed

MAX_NAMES = 2000
"""Names that are reported. DDP's import of `torch._dynamo` brings 800."""
MAX_BYTES, MAX_CHANGED_BYTES = 40_000, 15_000
"""Of the names, and of the variables, as JSON: a message has at most 60,000 bytes. Those 800 names have 23,000."""
MAX_CHANGED = 200
"""Variables that are reported; a program changes a few."""
_T = TypeVar("_T")
_OURS = frozenset({"ft_client", "ft_launcher", "rank_monitor", "__main__", "__mp_main__"})


def after_torch(modules: Mapping[str, object]) -> list[str]:
    """Returns the names of the modules of installed packages that come after torch, cut at `MAX_NAMES` and `MAX_BYTES`.

    Args:
        modules: `sys.modules`, or a copy of it: in the order in which the imports ended.
    """
    return list(_within(MAX_BYTES, islice(_all_after_torch(modules), MAX_NAMES)))


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables that were set, changed or removed, with their values (None: removed). Cut as the names are.

    Args:
        before: the environment at the start of the rank.
        now: the present one.
    """
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    values = ((name, now.get(name)) for name in names[:MAX_CHANGED])
    return dict(_within(MAX_CHANGED_BYTES, values))


def _within(most: int, parts: Iterable[_T]) -> Iterator[_T]:
    """Yields the first of `parts`, up to `most` bytes together as JSON."""
    for part in parts:
        most -= len(json.dumps(part)) + 2
        if most < 0:
            return
        yield part


def _all_after_torch(modules: Mapping[str, object]) -> Iterator[str]:
    """Yields the names of modules that come after torch and are of installed packages, ours excepted."""
    names = iter(modules)
    if "torch" not in names:  # the test itself moves the iterator to torch, or to the end
        return
    for name in names:
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names or root in _OURS:
            continue
        origin = _origin(modules[name])
        if origin is not None and is_installed(origin):
            yield name


def _origin(module: object) -> str | None:
    """Returns the file that a module was loaded from; None: it has none, as a namespace package."""
    if not isinstance(module, ModuleType):
        return None
    # Not by the module's own `__getattribute__`: a lazy module would load itself, and this thread must import nothing.
    spec = ModuleType.__getattribute__(module, "__dict__").get("__spec__")
    origin = getattr(spec, "origin", None)
    if isinstance(origin, str):
        return origin
    return None
