"""Which modules of installed packages a rank's program has imported after torch, and which variables have changed: what
the launcher must know to import the same before it forks the ranks of the next cycle. Pure.

`watchdog.py` asks for both, once, in the rank that the zygote has asked for them.
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
"""DDP's import of `torch._dynamo` brings 800."""
MAX_BYTES, MAX_CHANGED_BYTES = 40_000, 15_000
"""Of the names, and of the variables, as JSON: a message has at most 60,000. Those 800 names have 23,000."""
MAX_CHANGED = 200
_T = TypeVar("_T")
_OURS = frozenset({"ft_client", "ft_launcher", "rank_monitor", "__main__", "__mp_main__"})


def after_torch(modules: Mapping[str, object]) -> list[str]:
    """Returns the names of the modules of installed packages that come after torch, cut at `MAX_NAMES` and `MAX_BYTES`.

    Args:
        modules: `sys.modules`, or a copy of it: in the order in which the imports ended.
    """
    return list(_within(MAX_BYTES, islice(_all_after_torch(modules), MAX_NAMES)))


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Returns variables that were set, changed or removed (None), with their values, cut as the names are."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    values = ((name, now.get(name)) for name in names[:MAX_CHANGED])
    return dict(_within(MAX_CHANGED_BYTES, values))


def _within(most: int, parts: Iterable[_T]) -> Iterator[_T]:
    """Passes on what comes first, up to so many bytes as JSON."""
    for part in parts:
        most -= len(json.dumps(part)) + 2
        if most < 0:
            return
        yield part


def _all_after_torch(modules: Mapping[str, object]) -> Iterator[str]:
    names = iter(modules)
    if "torch" not in names:  # this goes on to torch, or to the end
        return
    for name in names:
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names or root in _OURS:
            continue
        origin = _origin(modules[name])
        if origin is not None and is_installed(origin):
            yield name


def _origin(module: object) -> str | None:
    if not isinstance(module, ModuleType):
        return None
    # Not by the module's own way of access: that loads a lazy one, and this thread must import nothing.
    spec = ModuleType.__getattribute__(module, "__dict__").get("__spec__")
    origin = getattr(spec, "origin", None)
    if isinstance(origin, str):
        return origin
    return None
