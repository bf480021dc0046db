"""The environment of an iteration, for `init_process_group()` by `env://` to make a new group each time."""

from __future__ import annotations

import os

from ft_client.inprocess.state import State, environment
from rank_monitor.contract.iteration_stores import variables_of

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")


class IterationEnvironment:
    """The process's environment while iterations run. LOCAL_RANK stays: it says which device is this rank's."""

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _NAMES}

    def set(self, state: State, note: str) -> None:
        """For the iteration of `state`, whose store server the `note` tells.

        Raises:
            RuntimeError: it has none.
        """
        os.environ.update(environment(state) | variables_of(note))

    def restore(self) -> None:
        """What was before the first iteration."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
