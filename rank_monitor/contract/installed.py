"""Whether a package is installed: NVIDIA's, beside which we keep our hands off its names.

The launcher asks for the program of the same name, the client's alias for the modules.
"""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, all_suffixes
from pathlib import Path

_CACHE = "__pycache__"


def file_of(spec: ModuleSpec | None) -> str | None:
    """Returns a file of the package with this spec; None: there is no such package.

    Releases of NVIDIA's package have no `__init__.py` at the top, so each folder of that name has a spec. One in which
    no module is left, as `pip uninstall` may leave it behind, is no package.
    """
    if spec is None:
        return None
    if spec.origin is not None:
        return spec.origin
    suffixes = tuple(all_suffixes())
    for location in spec.submodule_search_locations or ():
        for folder, folders, files in os.walk(location):
            if _CACHE in folders:
                folders.remove(_CACHE)
            module = next((name for name in files if name.endswith(suffixes)), None)
            if module is not None:
                return str(Path(folder, module))
    return None
