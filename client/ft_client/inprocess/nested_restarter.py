"""Callbacks of NVIDIA's names by which a rank tells the node's agent where it is in a restart in process.

The agent knows of a wrapper also without them; with them it knows more precisely when a restart begins and ends. Users
compose them with callbacks of their own, and `restart_config.py` does: `NestedRestarterHandlingStarting` as the last of
the aborts, since `Compose` calls the last one first. Who listens is not known here: `restart/call.py` sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.callback import Callback
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.state import FrozenState
from ft_client.inprocess.terminate import Terminate
from rank_monitor.contract.wire.messages import WrapperState

_sink: Callable[[WrapperState], None] | None = None


def send_to(sink: Callable[[WrapperState], None] | None) -> None:
    """Sets the function that every state is sent to; None: none, as at the start."""
    global _sink
    _sink = sink


class _Report(Callback):
    reported: ClassVar[WrapperState]

    def __call__(self, state: FrozenState) -> FrozenState:
        """Reports the state `reported` to the launcher, and returns `state`."""
        if _sink is not None:
            _sink(self.reported)
        return state


class NestedRestarterHandlingStarting(_Report, Abort):
    """A fault is being handled: what runs is about to be aborted."""

    reported = WrapperState.HANDLING_STARTING


class NestedRestarterHandlingCompleted(_Report, Initialize):
    """The restart is complete, or it is the first start: the function is about to be called.

    Args:
        special_rank: accepted for code written against NVIDIA's class; every rank reports here.
    """

    reported = WrapperState.HANDLING_COMPLETED

    def __init__(self, special_rank: int = 0) -> None:
        self.special_rank = special_rank


class NestedRestarterFinalized(_Report, Completion):
    """The function is done on all ranks."""

    reported = WrapperState.FINALIZED


class NestedRestarterAborted(_Report, Terminate):
    """This rank leaves for good."""

    reported = WrapperState.ABORTED
