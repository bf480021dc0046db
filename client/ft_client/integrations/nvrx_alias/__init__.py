"""Makes code that imports `nvidia_resiliency_ext` use our modules: call `install()`, or set FT_ALIAS_NVRX=1.

"The peer" in this package is NVIDIA's `nvidia_resiliency_ext`. `finder.py` maps its names and finds the modules;
`peer/` holds modules that exist only under the peer's names; the other files are modules of the peer that ours lack.
Where the real package is installed, nothing changes. Nothing of torch is imported here: this runs at the start of every
interpreter that has the variable. docs/migrate.md lists the names.
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

    Example, at the top of a script that is written for NVIDIA's package:

        from ft_client.integrations import nvrx_alias
        nvrx_alias.install()
        import nvidia_resiliency_ext.inprocess

    Returns:
        Whether such an import finds our modules.
    """
    return finder.put_in_place()


def install_if_asked() -> None:
    """Installs the alias if the variable FT_ALIAS_NVRX is true. Called as the interpreter starts.

    Looks for the real package only at the first import of its name: most interpreters never import it.
    """
    text = os.environ.get(env.ALIAS_NVRX, "").strip().lower()
    if text in kinds.BOOLEAN_TEXTS:
        if kinds.BOOLEAN.read(text):
            finder.put_in_place(check=False)
    elif text:
        logger.warning("%s=%s is neither true nor false: no alias for nvidia_resiliency_ext", env.ALIAS_NVRX, text)
