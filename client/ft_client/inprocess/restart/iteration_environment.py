"""Sets the environment of an iteration, so that `init_process_group()` by `env://` makes a new group each time."""

from __future__ import annotations

import os

from ft_client.inprocess.state import State, environment
from rank_monitor.contract.iterations.iteration_stores import variables_of

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")


class IterationEnvironment:
    """The process's environment while iterations run. LOCAL_RANK stays: it selects the device of this rank."""

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _NAMES}

    def set(self, state: State, note: str) -> None:
        """Sets the variables for the iteration of `state`, with the store server in `note`.

        Raises:
            RuntimeError: no server could be made.
        """
        os.environ.update(environment(state) | variables_of(note))

    def restore(self) -> None:
        """Restores the variables as they were before the first iteration."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
