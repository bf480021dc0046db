"""The peer's `checkpointing.utils`: times in the log, and functions for nested states."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

_logger = logging.getLogger("ft_client")


@contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Iterator[None]:
    """Logs how long a block, or a function that is decorated by this, has taken.

    Args:
        name: of the block.
        logger: that logs it; None: `ft_client`.
        threshold: seconds; less is not logged.
        level: of the line; None: DEBUG, with a threshold WARNING.
    """
    begun = time.monotonic()
    try:
        yield
    finally:
        taken = time.monotonic() - begun
        if taken >= threshold:
            if level is None:
                level = logging.DEBUG
                if threshold > float("-inf"):
                    level = logging.WARNING
            (logger or _logger).log(level, "%s took %.4fs", name, taken)


def debug_msg(msg: str) -> None:
    """Logs a line."""
    _logger.debug("%s", msg)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Returns a state with each value in dicts and lists changed, at any depth."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def preload_tensors(state_dict: Any, non_blocking: bool = True) -> Any:
    """Returns a state whose tensors are on the host.

    `non_blocking`: whether copies from a GPU may still be under way then.
    """

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", non_blocking=non_blocking)
        return value

    return dict_list_map_outplace(on_host, state_dict)


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that calls another without a pause by Python's collector of garbage."""

    @wraps(fn)
    def wrapped(state_dict: Any, *args: Any, **kwargs: Any) -> None:
        was_on = gc.isenabled()
        gc.disable()
        try:
            fn(state_dict, *args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return wrapped
