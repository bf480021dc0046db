"""Public names of a package whose modules are imported when a name is first used (PEP 562).

The packages with public names use it: `import ft_client` loads neither torch nor any module of ours. A name of one tool
loads that tool alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, homes: Mapping[str, str], modules: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the package's `__getattr__` and `__dir__`, and sets its `__all__`.

    Example: `__getattr__, __dir__ = lazy_names(__name__, {"Wrapper": ".wrapper"})`.

    Args:
        package: the `__name__` of the package.
        homes: public name -> the module that defines it, absolute or relative to the package (`.module`).
        modules: modules of the package that are public names themselves.
    """
    public = vars(sys.modules[package])["__all__"] = sorted([*homes, *modules])

    def get(name: str) -> object:
        if name in homes:
            value: object = getattr(import_module(homes[name], package), name)
        elif name in modules:
            value = import_module(f".{name}", package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, names
