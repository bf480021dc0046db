"""Takes a nested state apart into its tensors and the rest, and puts both together again. Pure.

What a tensor is, the caller says: this file never loads torch. Dicts, lists and tuples are looked into, at any depth;
what is in other containers stays where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLACE = "\0tensor "
"""Begins the text that stands in the place of a tensor; its number follows."""
_TEXT = "\0text "
"""Begins a text of the state that itself begins with a null byte, so that it is never taken for a place."""

_BASIC = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of values and keys that torch's weights-only reader always admits."""
_NUMBERS = frozenset({type(None), bool, int, float})
"""Those of them that stand in the rest as they are."""


@dataclass(frozen=True)
class ParsedState:
    """A state that was taken apart.

    Attributes:
        rest: the state, with a text in the place of each tensor.
        tensors: name -> tensor, in the order of the state. A name is the path to it, as in `optimizer.state.0.exp_avg`.
        others: path -> value, of all values that are neither tensors nor of a basic type, and of such keys.
    """

    rest: Any
    tensors: Mapping[str, Any]
    others: Mapping[str, Any]


def take_apart(state: Any, is_tensor: Callable[[Any], bool], name: str = "") -> ParsedState:
    """Returns the tensors of a state and the rest. Nothing is copied but the containers.

    Args:
        state: nested dicts, lists and tuples.
        is_tensor: tells tensors from other values.
        name: the beginning of all names.
    """
    apart = _Apart(is_tensor)
    rest = apart.of(state, name)
    return ParsedState(rest, apart.tensors, apart.others)


class OtherStructure(Exception):
    """A state is not built like the one before it."""


def take_apart_again(state: Any, before: Any, is_tensor: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Returns the rest of a state and its tensors, as `take_apart` gives them, but without names: for a state that is
    built like the one before it, in a third of the time.

    Args:
        state: nested dicts, lists and tuples.
        before: the rest of the state before.
        is_tensor: tells tensors from other values.

    Raises:
        OtherStructure: the tensors may have other names, or a value is neither a tensor nor of a basic type, or a key
            is not of a basic type.
    """
    tensors: list[Any] = []

    def again(value: Any, known: Any) -> Any:
        kind, known_kind = type(value), type(known)
        if known_kind is str and known.startswith(_PLACE):
            if not is_tensor(value):
                raise OtherStructure
            tensors.append(value)
            return known
        if kind is dict or kind is OrderedDict:
            if known_kind is not kind or list(known) != list(value) or not _are_basic(value):
                raise OtherStructure
            return kind([(key, again(item, known[key])) for key, item in value.items()])
        if kind is list or kind is tuple:
            if known_kind is not kind or len(known) != len(value):
                raise OtherStructure
            return kind([again(item, of_item) for item, of_item in zip(value, known, strict=True)])
        if kind not in _BASIC or known_kind not in _BASIC or (kind is str and value.startswith("\0")):
            raise OtherStructure
        return value

    return again(state, before), tensors


def put_together(rest: Any, tensors: Sequence[Any]) -> Any:
    """Returns the state again.

    Args:
        rest: as from `take_apart`.
        tensors: in the order of `ParsedState.tensors`.

    Raises:
        ValueError: the rest names a tensor that is not there.
    """
    if isinstance(rest, str):
        if rest.startswith(_TEXT):
            return rest[len(_TEXT) :]
        if rest.startswith(_PLACE):
            return _tensor_of(rest, tensors)
        return rest
    if type(rest) is dict or type(rest) is OrderedDict:
        return type(rest)((key, put_together(value, tensors)) for key, value in rest.items())
    if type(rest) is list or type(rest) is tuple:
        return type(rest)(put_together(value, tensors) for value in rest)
    return rest


def _tensor_of(place: str, tensors: Sequence[Any]) -> Any:
    try:
        return tensors[int(place[len(_PLACE) :])]
    except (ValueError, IndexError):
        raise ValueError("the state names a tensor that is not there") from None


class _Apart:
    """Walks through one state."""

    def __init__(self, is_tensor: Callable[[Any], bool]) -> None:
        self._is_tensor = is_tensor
        self.tensors: dict[str, Any] = {}
        self.others: dict[str, Any] = {}

    def of(self, value: Any, path: str) -> Any:
        """Returns what stands in the place of `value` in the rest, and notes its tensors."""
        kind = type(value)
        if kind is str and value.startswith("\0"):
            return _TEXT + value
        if kind in _BASIC:
            return value
        if kind is dict or kind is OrderedDict:
            if not _are_basic(value):
                self.others |= {f"key {key} of {path}": key for key in value if not _are_basic([key])}
            return kind((key, self._item(item, path, key)) for key, item in value.items())
        if kind is list or kind is tuple:
            return kind(self._item(item, path, index) for index, item in enumerate(value))
        if self._is_tensor(value):
            place = f"{_PLACE}{len(self.tensors)}"
            self.tensors[self._free_name(path)] = value
            return place
        self.others[path] = value
        return value

    def _item(self, value: Any, path: str, key: object) -> Any:
        """As `of`, for what a container has under a key. A list of a million numbers needs no million paths."""
        if type(value) in _NUMBERS:
            return value
        return self.of(value, _joined(path, key))

    def _free_name(self, path: str) -> str:
        """Returns `path`, or a name like it that no tensor has: keys that hold points may give one path twice."""
        if path not in self.tensors:
            return path
        number = 2
        while f"{path}#{number}" in self.tensors:
            number += 1
        return f"{path}#{number}"


def _are_basic(keys: Iterable[object]) -> bool:
    """Returns whether all keys of a dict are of basic types, or tuples of such keys. Equality does not tell: 3 is equal
    to numpy's 3."""
    return _BASIC.issuperset(map(type, keys)) or all(
        type(key) in _BASIC or (type(key) is tuple and _are_basic(key)) for key in keys
    )


def _joined(path: str, key: object) -> str:
    if not path:
        return str(key)
    return f"{path}.{key}"
