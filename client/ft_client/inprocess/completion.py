"""The callback that runs on a rank when the function is done on all ranks."""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Completion(Callback):
    """Runs once, after the last iteration, before the wrapper returns."""
