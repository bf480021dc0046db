"""The callback that runs on a rank when the function is done on all ranks.

`restart/user_function.py` runs the user's. All ranks have succeeded by then.
"""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Completion(Callback):
    """Runs once, after the last iteration, before the wrapper returns."""
