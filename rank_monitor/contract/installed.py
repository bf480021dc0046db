"""Says whether a package is installed, and whether a file is of an installed package.

The launcher and the client's alias ask for NVIDIA's package: where that is installed, our program and our modules of
the same names stand back. The launcher and the client also ask which modules of a program come from installed packages:
those may be imported before the ranks are forked.
"""

from __future__ import annotations

import os
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_CACHE = "__pycache__"
_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""What Python and Debian call the folders into which packages are installed."""


def is_installed(file: str) -> bool:
    """Whether a file is one of an installed package. A package that is installed as a link to a working tree (`pip
    install -e`) does not count."""
    return not _FOLDERS.isdisjoint(Path(file).parts)


def file_of(spec: ModuleSpec | None) -> str | None:
    """Returns a file of the package with this spec; None: there is no such package. Reads folders.

    Releases of NVIDIA's package have no `__init__.py` at the top, so each folder of that name has a spec. One in which
    no module is left, as `pip uninstall` may leave it behind, is no package.
    """
    if spec is None:
        return None
    if spec.origin is not None:
        return spec.origin
    from importlib.machinery import all_suffixes  # here: a rank calls `is_installed` alone, and loads no more than that

    suffixes = tuple(all_suffixes())
    for location in spec.submodule_search_locations or ():
        for folder, folders, files in os.walk(location):
            if _CACHE in folders:
                folders.remove(_CACHE)
            module = next((name for name in files if name.endswith(suffixes)), None)
            if module is not None:
                return str(Path(folder, module))
    return None
