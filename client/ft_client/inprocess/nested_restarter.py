"""Callbacks that tell the node's agent how far the in-process restart of this rank is: rung 1 of the two it knows.

A wrapper's registration alone suffices; these say more precisely when a restart begins and ends. Each stands where its
name says: `HandlingStarting` last in the composed abort, which is thus called first, and so on.
"""

from __future__ import annotations

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.restarter_report import report
from ft_client.inprocess.state import FrozenState
from ft_client.inprocess.terminate import Terminate


class NestedRestarterHandlingStarting(Abort):
    """A fault is being handled: what runs is about to be aborted."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        report("handling_starting")
        return state


class NestedRestarterHandlingCompleted(Initialize):
    """The restart is complete, or it is the first start: the function is about to be called.

    Args:
        special_rank: accepted for code written against NVIDIA's class; every rank reports here.
    """

    def __init__(self, special_rank: int = 0) -> None:
        self.special_rank = special_rank

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        report("handling_completed")
        return state


class NestedRestarterFinalized(Completion):
    """The function has come to its end on all ranks."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        report("finalized")
        return state


class NestedRestarterAborted(Terminate):
    """This rank leaves for good."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`."""
        report("aborted")
        return state
