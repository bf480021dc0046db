"""What frees a main thread that is blocked in a call. Runs in another thread; knows nothing of the restart."""

from __future__ import annotations

from ft_client.inprocess.callback import Callback


class Abort(Callback):
    """Makes blocking calls of the function return or fail, so that the main thread can be interrupted."""
