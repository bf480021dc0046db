"""ft_launcher: torchrun's command line, with ranks that are watched and restarted.

Nothing is loaded before it is asked for: importing this package must not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["LaunchConfig", "__version__", "launch"]


def __getattr__(name: str) -> Any:
    """`launch` and `LaunchConfig` live in `ft_launcher.launch`; its first import binds the module to the same name as
    the function, so the function is bound after it."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("ft-launcher")
    if name in __all__:
        value = getattr(importlib.import_module("ft_launcher.launch"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
