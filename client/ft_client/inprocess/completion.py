"""The callback that runs on a rank when the function is done on all ranks.

Users derive from `Completion`; `restart/user_function.py` calls it. It cannot start the function again: all ranks have
succeeded by then.
"""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Completion(Callback):
    """Runs once, after the last round, before the wrapper returns."""
