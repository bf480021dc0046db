"""What runs on a rank when the function has come to its end on all of them."""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Completion(Callback):
    """Runs once, after the last iteration, before the wrapper returns."""
