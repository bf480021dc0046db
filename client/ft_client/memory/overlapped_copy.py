"""A copy of tensors that runs behind the training, and finds out whether one of them changed meanwhile.

Torch counts changes of a tensor in its version, but not those through `.data` or through an array of numpy that shares
its memory. So each copy is compared with its source once all are made. Whatever is equal then was not changed between
the copies and the comparison, so no file holds a tensor of two states. A change before a tensor's own copy that torch
does not count is found where it changes the beginning of the tensor, which is noted when the save begins.

Uses torch's underscored `_version` of a tensor.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from ft_client.memory import tensor_parts

_NOTED_BYTES = 256
"""Of the beginning of each tensor."""
_WHOLE_NUMBERS: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their size: types in which bits are compared, so that NaN is equal to itself."""


class StateChanged(Exception):
    """A tensor changed while it was copied: what was saved is no state that the training ever had."""


@dataclass(frozen=True)
class _Pending:
    """A tensor that is to be copied.

    Attributes:
        name: of the tensor, for errors.
        source: the training's own; an alias, which no assignment to `.data` moves.
        target: where the copy goes.
        version: of the source when the save began.
        address: of the source when the save began.
        beginning: a copy of the first elements of the source when the save began.
    """

    name: str
    source: Any
    target: Any
    version: int
    address: int
    beginning: Any


class OverlappedCopy:
    """The tensors of one save that are copied later. `add` is called by the main thread, then `run` by the background's
    thread; `wait` by whoever is about to change the tensors."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._ended = threading.Event()
        self._process = os.getpid()

    def add(self, name: str, target: Any, source: Any) -> None:
        """Notes a tensor that is to be copied. The target has the same type and shape."""
        source = source.detach()
        beginning = tensor_parts.beginning_of(source, _NOTED_BYTES).clone()
        self._pending.append(_Pending(name, source, target, source._version, source.data_ptr(), beginning))

    def run(self) -> None:
        """Copies all tensors, and compares them.

        Raises:
            StateChanged: one of them is not what it was when the save began.
        """
        try:
            with torch.no_grad():
                for pending in self._pending:
                    _copy(pending)
                for pending in self._pending:
                    _check(pending)
        finally:
            # Nothing here keeps the training's tensors alive any more.
            self._pending.clear()
            self._ended.set()

    def wait(self) -> None:
        """Waits until the tensors may change: all were copied and compared, or the copy has failed."""
        if os.getpid() == self._process:  # a forked process has no such thread
            self._ended.wait()


def _copy(pending: _Pending) -> None:
    """Copies one tensor. Raises StateChanged where its memory is gone, which cannot be read."""
    if pending.source.data_ptr() != pending.address:
        raise StateChanged(f"{pending.name} lies elsewhere than when the save began")
    pending.target.copy_(pending.source)


def _check(pending: _Pending) -> None:
    """Raises StateChanged unless a tensor is what it was when the save began, and the copy is alike."""
    if pending.source._version != pending.version or pending.source.data_ptr() != pending.address:
        raise StateChanged(f"{pending.name} changed before the optimizer's next step")
    beginning = tensor_parts.beginning_of(pending.target, _NOTED_BYTES)
    if not _are_alike(pending.beginning, beginning) or not _are_alike(pending.source, pending.target):
        raise StateChanged(f"{pending.name} changed before the optimizer's next step, unseen by torch")


def _are_alike(one: Any, other: Any) -> bool:
    """Returns whether two tensors of one type and shape have the same bits."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    kind = _WHOLE_NUMBERS[one.element_size()]
    return bool(torch.equal(one.view(kind), other.view(kind)))
