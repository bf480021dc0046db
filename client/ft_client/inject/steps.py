"""Where the training is, as it shows by itself: calls of the client, and steps of optimizers.

The client's methods are wrapped while somebody listens, so that without a drill nothing is paid for. A script that
does not know the client is counted by torch's public hook after each optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from ft_client import process
from ft_client.after_import import after_import
from ft_client.inject.when import Source, StepCount
from ft_client.learned_limits import STEP
from ft_client.progress import megatron_iteration
from ft_client.signs_of_life import SignsOfLife

_OPTIMIZER = "torch.optim.optimizer"


class Listener(Protocol):
    """Who wants to know. Called in the training's thread."""

    def on_step(self, steps: range) -> None:
        """The training came to these steps."""

    def on_section(self, name: str) -> None:
        """A section was opened."""


_listeners: list[Listener] = []
_count = StepCount()


def listen(listener: Listener) -> None:
    """Has `listener` called from now on, in this process only."""
    if not _listeners:
        _wrap("report_iteration", lambda iteration: _note(Source.ITERATIONS, int(iteration)))
        _wrap("start_section", _note_section)
        _wrap("end_section", lambda section: _note(Source.STEP_SECTIONS) if section == STEP else None)
        _wrap("send_heartbeat", lambda: _note(Source.HEARTBEATS))
        after_import(_OPTIMIZER, lambda module: module.register_optimizer_step_post_hook(_optimizer_stepped))
    _listeners.append(listener)


def _wrap(name: str, then: Callable[..., None]) -> None:
    method = getattr(SignsOfLife, name)

    @functools.wraps(method)
    def wrapped(self: SignsOfLife, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        then(*args, **kwargs)

    setattr(SignsOfLife, name, wrapped)


def _optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    iteration = megatron_iteration()
    if iteration is None:
        _note(Source.OPTIMIZER_STEPS, who=id(optimizer))
    else:
        _note(Source.ITERATIONS, iteration)


def _note(source: Source, iteration: int | None = None, who: object = None) -> None:
    if process.is_forked() or (steps := _count.reached(source, iteration, who)) is None:
        return
    for listener in tuple(_listeners):
        listener.on_step(steps)


def _note_section(section: str) -> None:
    if not process.is_forked():
        for listener in tuple(_listeners):
            listener.on_section(section)
