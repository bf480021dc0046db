"""Makes a dataclass from a JSON object, checking each field against its type, and a JSON object from a dataclass.

All code that reads what another process wrote calls it: for messages, keys of stores, files and journals. None of these
is known here. A returned value has the types that its class declares, so no caller needs to check them again.

Example: `from_json(ControlRequest, {"action": "restart", "description": ""})`.

The type of a field may be:

- `int`, `float`, `bool`, `str`, `None`, an `Enum` (by its values), `Any`, or a union of types with different JSON forms
- `list[T]`, `Sequence[T]`, `tuple[T, ...]` or `tuple[A, B]`, all from a JSON array
- `dict`, `dict[str, T]` or `Mapping[str, T]`; with `int` in the place of `str` the keys become numbers
- another dataclass of such fields
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.foreign import parse_json

_T = TypeVar("_T")

_Readers: TypeAlias = "dict[type, Callable[[Any], Any]]"
"""Python's type of a JSON value -> the function that makes the value of a field of it, or raises ValueError. A JSON
value of another type does not fit."""

_JSON_TYPES = (dict, list, str, int, float, bool, type(None))
"""All types that a parsed JSON value can have."""


def from_json(expected: type[_T], values: object, ignore_unknown: bool = False) -> _T:
    """Returns an instance of `expected` with the fields of a JSON object. A field with a default may be missing.

    Args:
        expected: a dataclass with fields of the types above.
        values: a parsed JSON value.
        ignore_unknown: leave out fields that `expected`, or a dataclass in it, does not have: another release wrote
            them, as in a journal.

    Raises:
        ProtocolError: `values` is no object, has an unknown field, lacks one, or has a value of another type. The text
            names the class and the field.
    """
    # A class is hashable, although mypy does not know that here.
    fields = _fields(expected, ignore_unknown)  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise ProtocolError(f"{expected.__name__}: not an object")
    found = {}
    for name, value in values.items():
        if name in fields:
            try:
                found[name] = _read(value, fields[name])
            except ValueError:
                raise ProtocolError(f"{expected.__name__}: field {name!r} does not fit") from None
        elif not ignore_unknown:
            raise ProtocolError(f"{expected.__name__}: unknown field {name!r}")
    try:
        return expected(**found)
    except TypeError as error:
        raise ProtocolError(f"{expected.__name__}: {error}") from None


def read_record(expected: type[_T], text: str | bytes) -> _T:
    """Returns an instance of `expected` from a JSON text that another process wrote.

    Raises:
        ProtocolError: the text is not JSON, or not within the bounds of `parse_json`; or as for `from_json`.
    """
    try:
        values = parse_json(text)
    except ValueError as problem:
        raise ProtocolError(f"{expected.__name__}: {problem}") from None
    return from_json(expected, values)


def to_json(record: Any) -> dict[str, Any]:
    """Returns the JSON object of a dataclass, as `from_json` reads it: enums become their values, and tuples lists."""
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def write_record(record: Any) -> str:
    """Returns the JSON text of a dataclass, as `read_record` reads it."""
    return json.dumps(to_json(record))


def real(facts: Mapping[str, Any], name: str) -> float | None:
    """Returns the finite number under a name; None: there is none, or something else."""
    value = facts.get(name)
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    return None


@functools.cache
def _fields(expected: type, ignore_unknown: bool) -> Mapping[str, _Readers]:
    """Returns, by name of each field, how its value is made. Once for each class: types are slow to look into."""
    # The hints of `__init__`, which knows the variables of its module. Those of a class are looked up in `sys.modules`,
    # where a rank may not have our modules (`rank/start/script.py: release_own_names`).
    hints = typing.get_type_hints(expected.__init__)  # type: ignore[misc]
    return {name: _readers(hint, ignore_unknown) for name, hint in hints.items() if name != "return"}


def _readers(hint: Any, ignore_unknown: bool) -> _Readers:
    """Returns how a value of the type `hint` is made."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    # Python 3.10 makes a `typing.Union` of a hint whose default is None.
    if origin in (types.UnionType, typing.Union):
        found: _Readers = {}
        for part in parts:
            found |= _readers(part, ignore_unknown)
        return found
    if origin is Any:
        return dict.fromkeys(_JSON_TYPES, _as_it_is)
    if origin is float:
        return dict.fromkeys((float, int), _finite)
    if origin in (list, tuple, Sequence):
        return {list: _reader_of_array(origin, parts, ignore_unknown)}
    if origin in (dict, Mapping):
        return {dict: _reader_of_object(parts, ignore_unknown)}
    if isinstance(origin, type) and dataclasses.is_dataclass(origin):
        return {dict: functools.partial(from_json, origin, ignore_unknown=ignore_unknown)}
    if isinstance(origin, type) and issubclass(origin, Enum):
        return {type(member.value): origin for member in origin}
    return {origin: _as_it_is}


def _reader_of_array(origin: Any, parts: tuple[Any, ...], ignore_unknown: bool) -> Callable[[Any], Any]:
    """Returns what makes a list or a tuple of a JSON array."""
    if origin is tuple and parts[-1] is not ...:
        each = [_readers(part, ignore_unknown) for part in parts]
        return lambda values: tuple(_read(value, items) for value, items in zip(values, each, strict=True))
    items = _readers(parts[0], ignore_unknown)
    if origin is tuple:
        return lambda values: tuple(_read(value, items) for value in values)
    return lambda values: [_read(value, items) for value in values]


def _reader_of_object(parts: tuple[Any, ...], ignore_unknown: bool) -> Callable[[Any], Any]:
    """Returns what makes a dict of a JSON object."""
    if not parts or parts[1] is Any:
        return _as_it_is
    key, items = parts[0], _readers(parts[1], ignore_unknown)
    return lambda values: {key(name): _read(value, items) for name, value in values.items()}


def _read(value: object, readers: _Readers) -> Any:
    """Returns the value of a field, made of a JSON value. Raises ValueError: the JSON value has another type."""
    reader = readers.get(type(value))  # not `isinstance`, by which a bool is an int
    if reader is None:
        raise ValueError("a JSON value of another type")
    return reader(value)


def _as_it_is(value: Any) -> Any:
    return value


def _finite(value: float) -> float:
    """Returns the number. Raises ValueError for infinity, NaN, and a whole number that no float can hold."""
    if abs(value) <= sys.float_info.max:
        return value
    raise ValueError("no finite number")


def _plain(value: Any) -> Any:
    """Returns the JSON value of a field."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value
