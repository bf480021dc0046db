"""Makes code that imports `nvidia_resiliency_ext` use our modules: call `install()`, or set FT_ALIAS_NVRX=1.

`finder.py` maps the names and finds the modules, and `peer/` holds modules that exist only under the peer's names.
Where the real package is installed, nothing changes. Nothing of torch is imported here: this runs at the start of every
interpreter that has the variable.
"""

from __future__ import annotations

import logging
import os

from ft_client.integrations.nvrx_alias import finder
from rank_monitor.contract import env
from rank_monitor.contract.settings import kinds

logger = logging.getLogger("ft_client")


def install() -> bool:
    """Makes `import nvidia_resiliency_ext...` find our modules, unless the real package is installed.

    Returns:
        Whether such an import finds our modules.
    """
    return finder.put_in_place()


def install_if_asked() -> None:
    """Installs the alias if FT_ALIAS_NVRX is true. Looks for the real package only at the first import."""
    text = os.environ.get(env.ALIAS_NVRX, "").strip().lower()
    if text in kinds.BOOLEAN_TEXTS:
        if kinds.BOOLEAN.read(text):
            finder.put_in_place(look=False)
    elif text:
        logger.warning("%s=%s is neither true nor false: no alias for nvidia_resiliency_ext", env.ALIAS_NVRX, text)
