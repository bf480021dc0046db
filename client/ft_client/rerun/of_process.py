"""The one machine of this process. Made anew at each `initialize`: a function that is called again starts afresh."""

from __future__ import annotations

from typing import Any

from ft_client.rerun.data_iterator import keep
from ft_client.rerun.state_machine import RerunStateMachine

_machine: RerunStateMachine | None = None


def initialize_rerun_state_machine(**arguments: Any) -> RerunStateMachine:
    """Makes the machine of this process, in place of one that was there; the arguments are `RerunStateMachine`'s."""
    global _machine
    _machine = RerunStateMachine(**arguments)
    return _machine


def get_rerun_state_machine() -> RerunStateMachine:
    """The machine of this process; a disabled one when none was made."""
    return _machine if _machine is not None else initialize_rerun_state_machine()


def destroy_rerun_state_machine() -> None:
    """Forgets it."""
    global _machine
    _machine = None
    keep(True)
