"""Follows the training by its calls of the client and by the steps of its optimizers.

Faults that wait for a step or a section, and the fault `straggle`, call `listen`. Until the first of them does, nothing
is wrapped: a rank without injected faults pays nothing. Then the client's methods that report progress call their
listeners as well. The steps of a script that never calls the client are counted by torch's public hook after each
optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ft_client.inject.trigger import Source, StepCount
from ft_client.rank.monitoring import process
from ft_client.rank.monitoring.learned_limits import STEP
from ft_client.rank.monitoring.signs_of_life import SignsOfLife
from ft_client.rank.monitoring.watchdog import megatron_iteration
from ft_client.rank.start.after_import import after_import

_OPTIMIZER = "torch.optim.optimizer"
"""The module that has torch's hook after each optimizer step."""


_on_step: list[Callable[[range], None]] = []
_on_section: list[Callable[[str], None]] = []
_count = StepCount()


def listen(on_step: Callable[[range], None], on_section: Callable[[str], None] | None = None) -> None:
    """Has the training call these functions from now on: in its own thread, in this process but not in its forks.

    A data loader's worker is a fork of the rank, in which the rank's faults must not happen.

    Args:
        on_step: called with the numbers of the steps that the training has just reached.
        on_section: called with the name of a section that was opened; None: sections do not matter.
    """
    if not _on_step:
        _wrap("report_iteration", lambda iteration: _note(Source.ITERATIONS, int(iteration)))
        _wrap("start_section", _note_section)
        _wrap("end_section", _note_end_of_section)
        _wrap("send_heartbeat", lambda: _note(Source.HEARTBEATS))
        after_import(_OPTIMIZER, lambda module: module.register_optimizer_step_post_hook(_optimizer_stepped))
    _on_step.append(on_step)
    if on_section is not None:
        _on_section.append(on_section)


def _wrap(name: str, then: Callable[..., None]) -> None:
    """Wraps a method of the client such that `then` is called after it, with the same arguments."""
    method = getattr(SignsOfLife, name)

    @functools.wraps(method)
    def wrapped(self: SignsOfLife, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        then(*args, **kwargs)

    setattr(SignsOfLife, name, wrapped)


def _optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Called by torch after each optimizer step. Megatron-LM's own count of iterations is preferred, where it is."""
    iteration = megatron_iteration()
    if iteration is None:
        _note(Source.OPTIMIZER_STEPS, who=id(optimizer))
    else:
        _note(Source.ITERATIONS, iteration)


def _note(source: Source, iteration: int | None = None, who: object = None) -> None:
    """Counts a step, and calls the listeners where the training has reached new steps."""
    if process.is_forked():
        return
    steps = _count.reached(source, iteration, who)
    if steps is None:
        return
    for on_step in tuple(_on_step):
        on_step(steps)


def _note_end_of_section(section: str) -> None:
    if section == STEP:
        _note(Source.STEP_SECTIONS)


def _note_section(section: str) -> None:
    """Calls the listeners of sections."""
    if not process.is_forked():
        for on_section in tuple(_on_section):
            on_section(section)
