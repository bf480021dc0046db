"""ft_launcher: torchrun's command line, with ranks that are watched and restarted.

From Python the same job is started by `launch`:

    from ft_launcher import LaunchConfig, launch

    if __name__ == "__main__":
        losses = launch(train, LaunchConfig(nproc_per_node=2))("config.yaml")  # global rank -> what train returned

Attributes are imported at their first use. Importing this package must not import torch: `cli.py` first prepares the
environment for torch's import.
"""

from __future__ import annotations

# Neither `typing` nor `importlib` here: they take 10 ms, for which each interpreter with FT_AS_TORCHRUN would wait.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer

    from ft_launcher.python_api import LaunchConfig, launch

__all__ = ["EtcdServer", "LaunchConfig", "__version__", "launch"]

# Attribute -> the module that has it. `EtcdServer` is torch's, for programs that import it from their launcher.
_MODULE_OF = {
    "EtcdServer": "torch.distributed.elastic.rendezvous.etcd_server",
    "LaunchConfig": "ft_launcher.python_api",
    "launch": "ft_launcher.python_api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        return str(importlib.import_module("importlib.metadata").version("ft-launcher"))
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
