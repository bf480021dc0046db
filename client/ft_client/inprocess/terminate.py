"""The callback that runs on a rank that leaves while others go on.

Users derive from `Terminate`; `restart/user_function.py` calls it. What it raises is logged, and never keeps the rank.
"""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Terminate(Callback):
    """Runs once on a rank that ends for good, before the wrapper raises."""
