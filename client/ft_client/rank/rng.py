"""The random numbers of a step: the state of every generator, kept, restored, and written down as JSON.

A step that is computed again must draw the same numbers as the first time, for dropout and data, or every result would
differ. The rerun machine saves the state before each step and restores it before a rerun; `rerun/checkpoint.py` writes
it for a step in doubt; `memory/` keeps it with the training's state. This file draws no numbers itself. The generators
are:

- Python's `random`;
- numpy's, when `numpy.random` is loaded: numpy loads it when it is first used, and its state takes 30 us to read;
- torch's for the CPU;
- torch's for the present CUDA device, when CUDA is in use.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RngState:
    """The state of each generator; None: the generator was not in use."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    torch: Any
    device: Any


def save() -> RngState:
    """Returns the present state of every generator that is in use."""
    of_numpy = sys.modules.get("numpy.random")
    return RngState(
        random.getstate(),
        of_numpy.get_state() if of_numpy else None,
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    )


def restore(state: RngState) -> None:
    """Sets every generator in `state` back, so that it gives again what it gave after `save`."""
    random.setstate(state.python)
    if state.numpy is not None:
        import numpy

        numpy.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if state.device is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.device)


def to_json(state: RngState) -> dict[str, Any]:
    """Returns the state as numbers, lists and text: JSON, as never anything in a checkpoint of ours is unpickled."""
    version, numbers, gauss = state.python
    form: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _hex(state.torch)}
    if state.numpy is not None:
        name, keys, position, has_gauss, cached = state.numpy
        form["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if state.device is not None:
        form["device"] = _hex(state.device)
    return form


def from_json(form: dict[str, Any]) -> RngState:
    """Returns what `to_json` wrote."""
    version, numbers, gauss = form["python"]
    if "numpy" in form:
        numpy = tuple(form["numpy"])
    else:
        numpy = None
    if "device" in form:
        device = _bytes(form["device"])
    else:
        device = None
    return RngState((version, tuple(numbers), gauss), numpy, _bytes(form["torch"]), device)


def _hex(state: Any) -> str:
    """Returns a tensor of bytes as text."""
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> Any:
    """Returns the tensor of bytes that `_hex` wrote."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
