"""Code that was written against `nvidia_resiliency_ext` runs on our modules: `install()`, or FT_ALIAS_NVRX=1.

What stands behind which name is told in `names.py`, how an import comes there in `finder.py`; `peer/` holds the modules
that exist for the peer's names alone. Where the real package is installed, nothing is changed. Loads nothing of torch:
it runs at the start of every interpreter that has the variable.
"""

from __future__ import annotations

import logging
import os

from ft_client.integrations.nvrx_alias import finder
from rank_monitor.contract import env
from rank_monitor.contract.settings import kinds

logger = logging.getLogger("ft_client")


def install() -> bool:
    """Makes `import nvidia_resiliency_ext...` find our modules, unless the real package is there.

    Returns:
        Whether it does.
    """
    return finder.put_in_place()


def install_if_asked() -> None:
    """Calls `install` where the environment asks for it; looks for the real package at the first import only."""
    word = os.environ.get(env.ALIAS_NVRX, "").strip().lower()
    if word in kinds.BOOLEAN_WORDS:
        if kinds.BOOLEAN.read(word):
            finder.put_in_place(look=False)
    elif word:
        logger.warning("%s=%s is neither true nor false: no alias for nvidia_resiliency_ext", env.ALIAS_NVRX, word)
