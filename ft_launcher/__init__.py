"""ft_launcher: torchrun's command line, with ranks that are watched and restarted.

Nothing is loaded before it is asked for: importing this package must not import torch.
"""

from __future__ import annotations

import importlib

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return str(importlib.import_module("importlib.metadata").version("ft-launcher"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
