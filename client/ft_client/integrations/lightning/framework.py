"""The package of Lightning that this process uses, and its class `Callback`. No other file imports Lightning.

Lightning exists as two packages with the same classes. `pytorch_lightning` is used where the script has imported it
already, or where it alone is installed; else `lightning.pytorch`. So a script with `pytorch_lightning` must import it
before these callbacks. With Lightning 2.6 a callback of either package works in a trainer of the other; older releases
refuse it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from importlib import import_module, metadata
from typing import TYPE_CHECKING

_MODULES = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
"""Package to install -> module to import."""
_OLDEST = (2, 4)
"""The oldest release that works, as in the extra `lightning` of pyproject.toml."""
_WANTED = "pip install -U 'lightning>=2.4'"


def choose(loaded: Collection[str], installed: Mapping[str, str]) -> str:
    """Returns the module of Lightning to import. Pure.

    Args:
        loaded: names of the modules that this process has imported.
        installed: package -> version, of those that are installed.

    Raises:
        ImportError: Lightning is not installed, or the package in use is too old.
    """
    if not installed:
        raise ImportError(f"these callbacks need Lightning, which is not installed here: {_WANTED}")
    package = next((name for name in installed if _MODULES[name] in loaded), next(iter(installed)))
    version = installed[package]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < _OLDEST:
        raise ImportError(f"{package} {version} is too old for these callbacks: {_WANTED}")
    return _MODULES[package]


def _installed() -> dict[str, str]:
    """Returns the installed packages of Lightning with their versions, in the order of `_MODULES`."""
    found = {}
    for package in _MODULES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = import_module(choose(sys.modules, _installed())).Callback

__all__ = ["Callback", "choose"]
