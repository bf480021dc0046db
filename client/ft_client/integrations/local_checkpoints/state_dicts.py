"""`TensorAwareStateDict`: what a manager needs of a rank's state, and `BasicTensorAwareStateDict`, which wraps a dict.

Megatron Core has a class of its own below the first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch


class TensorAwareStateDict(ABC):
    """A state whose tensors can be taken out, put back, and moved to the host. *Hollow*: its tensors are out."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Takes the tensors out, and returns them. The state is hollow then."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors of a state that is not hollow."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors are out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Puts tensors back, in the order of `pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Puts empty tensors into a hollow state, of the shapes, kinds and devices of those that were there."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replaces the tensors by copies on the host, and notes their devices. `non_blocking`: whether it may return
        before the copies are made."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Moves the tensors to the devices that were noted."""

    def values(self) -> ValuesView[Any]:
        """Returns the values of the object's attributes."""
        return vars(self).values()


class TensorPlaceholder:
    """What stands in a hollow state for a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._shape = tensor.shape
        self._dtype = tensor.dtype

    def init_tensor(self) -> torch.Tensor:
        """Returns an empty tensor like the one that was there."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A dict as the state: tensors may be in dicts and lists at any depth, on any device.

    Args:
        state_dict: the dict. It is changed in place.
    """

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._kinds: list[str] = []
        """Of the tensors in their order, once they were copied to the host."""

    def pop_tensors(self) -> list[torch.Tensor]:
        found = list(self.tensors)
        map_in_place(_of_tensors(TensorPlaceholder), self.state_dict)
        self._is_hollow = True
        return found

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        assert not self._is_hollow
        return (value for value in nested_values(self.state_dict) if isinstance(value, torch.Tensor))

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        left = iter(tensor_data)
        self._fill(lambda placeholder: next(left))

    def init_tensors(self) -> None:
        self._fill(TensorPlaceholder.init_tensor)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        devices: list[str] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            devices.append(tensor.device.type)
            if tensor.device.type == "cpu":
                # The training goes on to change the tensor.
                return tensor.detach().clone()
            return tensor.detach().to("cpu", non_blocking=non_blocking)

        assert not self._is_hollow
        map_in_place(_of_tensors(copied), self.state_dict)
        if not self._kinds:
            self._kinds = devices

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        assert not self._is_hollow
        devices = iter(self._kinds)
        # A device is noted by its kind: the rank may have another one of it now.
        map_in_place(
            _of_tensors(lambda tensor: tensor.to(next(devices, tensor.device.type), non_blocking=non_blocking)),
            self.state_dict,
        )
        self._kinds = []

    def _fill(self, made: Callable[[TensorPlaceholder], torch.Tensor]) -> None:
        assert self._is_hollow

        def filled(value: Any) -> Any:
            if isinstance(value, TensorPlaceholder):
                return made(value)
            return value

        map_in_place(filled, self.state_dict)
        self._is_hollow = False


def nested_values(state: Any) -> Iterator[Any]:
    """Yields all values in dicts and lists, at any depth."""
    values = state
    if isinstance(state, dict):
        values = state.values()
    for value in values:
        if isinstance(value, dict | list):
            yield from nested_values(value)
        else:
            yield value


def map_in_place(change: Callable[[Any], Any], state: Any) -> Any:
    """Replaces each value in dicts and lists, at any depth. Returns the state."""
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = map_in_place(change, value)
    elif isinstance(state, list):
        state[:] = [map_in_place(change, value) for value in state]
    else:
        return change(state)
    return state


def _of_tensors(change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Returns a function that changes tensors, and leaves other values as they are."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return value

    return changed
