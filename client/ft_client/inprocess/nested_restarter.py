"""Callbacks of NVIDIA's names for the moments of a restart in process that the agent of NVIDIA's launcher is told.

The wrapper reports each phase to the agent by itself (`restart/monitor_link.py`), so these do nothing. They stand for
code written against NVIDIA's extension, which composes them with callbacks of its own, as `restart_config.py` does. A
"restart" of these names is a round of ours that follows another.
"""

from __future__ import annotations

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.callback import Callback
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.state import FrozenState
from ft_client.inprocess.terminate import Terminate


class _Nothing(Callback):
    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        return state


class NestedRestarterHandlingStarting(_Nothing, Abort):
    """A fault is being handled, which ends our round: the wrapper reports INTERRUPTING and RECOVERING."""


class NestedRestarterHandlingCompleted(_Nothing, Initialize):
    """The next of our rounds begins, or the first: the wrapper reports RUNNING.

    Args:
        special_rank: accepted for code written against NVIDIA's class; every rank reports.
    """

    def __init__(self, special_rank: int = 0) -> None:
        self.special_rank = special_rank


class NestedRestarterFinalized(_Nothing, Completion):
    """Our last round is done on all ranks: the wrapper reports DONE."""


class NestedRestarterAborted(_Nothing, Terminate):
    """This rank leaves our round for good: the wrapper reports LEFT or GAVE_UP."""
