"""The callback that runs on a rank that leaves while others go on.

`restart/user_function.py` runs the user's. What it raises is logged: the rank leaves in any case.
"""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Terminate(Callback):
    """Runs once on a rank that ends for good, before the wrapper raises."""
