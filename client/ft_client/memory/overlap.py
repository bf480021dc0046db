"""Which tensors may be copied behind the training, and the hooks that wait for the copy before they change.

These are the parameters and the state of torch's optimizers that the user has named: nothing but the optimizer's step
changes them, and before it torch calls a hook.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ft_client.memory import tensor_parts
from ft_client.memory.overlapped_copy import OverlappedCopy
from ft_client.memory.tensor_parts import Meshes


def why_not(objects: Mapping[str, Any]) -> str:
    """Returns why the saves of these objects cannot overlap with the training; empty where they can."""
    optimizers = {name: kept for name, kept in objects.items() if hasattr(kept, "param_groups")}
    if not optimizers:
        return "no torch.optim.Optimizer is among the objects"
    for name, kept in optimizers.items():
        # What calls no hooks before its step: a wrapper that is a subclass in name alone.
        if not isinstance(kept, torch.optim.Optimizer) or not getattr(type(kept).step, "hooked", False):
            return f"{name} is a {tensor_parts.class_name(type(kept))}, which calls no hook of torch.optim.Optimizer"
        for group in kept.param_groups:
            for parameter in group["params"]:
                if parameter.device.type != "cpu":
                    return f"{name} has parameters on {parameter.device}, and only those on the CPU are copied later"
    return ""


class Overlap:
    """The hooks of one `MemoryCheckpoint`.

    The optimizers keep this object alive, so it holds none of the user's objects.

    Args:
        objects: for which `why_not` has no reason.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._copy: OverlappedCopy | None = None
        self._blocked_s = 0.0
        self._hooks = [kept.register_step_pre_hook(self._before_step) for kept in _optimizers(objects)]

    def begins(self, copy: OverlappedCopy) -> None:
        """Has the next step of each optimizer wait for a copy, which the background's thread has already got."""
        self._copy = copy

    def pop_blocked_s(self) -> float:
        """Returns for how long steps of optimizers have waited since the last call (seconds)."""
        blocked_s = self._blocked_s
        self._blocked_s = 0.0
        return blocked_s

    def close(self) -> None:
        """Takes the hooks away. Called when no copy is under way."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._copy = None

    def _before_step(self, *_: Any) -> None:
        copy = self._copy
        if copy is None:
            return
        began = time.monotonic()
        copy.wait()
        # Only now: where an interrupt ends the wait, the next step waits again.
        self._copy = None
        self._blocked_s += time.monotonic() - began


def memory_of_optimizers(objects: Mapping[str, Any]) -> frozenset[int]:
    """Returns the addresses of the memory that only steps of the optimizers change. To be called within
    `torch.no_grad`."""
    meshes = Meshes()
    found = set()
    for kept in _optimizers(objects):
        tensors = [parameter for group in kept.param_groups for parameter in group["params"]]
        tensors += [value for state in kept.state.values() for value in _tensors_of(state)]
        for tensor in tensors:
            for part in tensor_parts.parts_of("", tensor, meshes)[0].values():
                found.add(part.untyped_storage().data_ptr())
    return frozenset(found - {0})


def may_wait(part: Any, memory: frozenset[int]) -> bool:
    """Returns whether a plain tensor may be copied later. `memory`: as from `memory_of_optimizers`."""
    if part.device.type != "cpu" or part.is_inference():  # the latter has no version
        return False
    return part.untyped_storage().data_ptr() in memory


def _tensors_of(state: Any) -> list[Any]:
    """Returns the tensors in an optimizer's state of one parameter. What lies deeper is copied at once."""
    if not isinstance(state, dict):
        return []
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.layout is torch.strided]


def _optimizers(objects: Mapping[str, Any]) -> list[Any]:
    return [kept for kept in objects.values() if isinstance(kept, torch.optim.Optimizer)]
