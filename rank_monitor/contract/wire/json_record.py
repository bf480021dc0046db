"""Makes a dataclass from a JSON object, checking each field against its type, and a JSON object from a dataclass.

All who read what another process wrote call it: messages, keys of stores, files. It knows none of them. Fields may be
`int`, `float`, `bool`, `str`, `dict`, `list[str]`, `None` and unions of these.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.foreign import parse_json

_T = TypeVar("_T")


def _json_types(hint: Any) -> frozenset[type]:
    """The Python types of the JSON values that a field of this type accepts."""
    # Python 3.10 makes a `typing.Union` of it where the default is None.
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
    else:
        options = (hint,)
    plain = {typing.get_origin(option) or option for option in options}
    if float in plain:
        plain.add(int)
    return frozenset(plain)


@functools.cache
def _fields(expected: type) -> Mapping[str, frozenset[type]]:
    # Of `__init__`, which knows its module: a class looks for it in `sys.modules`, where a rank may not have ours.
    hints = typing.get_type_hints(expected.__init__)  # type: ignore[misc]
    return {name: _json_types(hint) for name, hint in hints.items() if name != "return"}


def from_json(expected: type[_T], values: object) -> _T:
    """An instance of `expected` with these fields.

    Raises:
        ProtocolError: not an object, an unknown or missing field, or a value of another type.
    """
    fields = _fields(expected)  # type: ignore[arg-type]  # a class is hashable, whatever mypy holds of it
    if not isinstance(values, dict):
        raise ProtocolError(f"{expected.__name__}: not an object")
    for name, value in values.items():
        if name not in fields:
            raise ProtocolError(f"{expected.__name__}: unknown field {name!r}")
        if not _fits(value, fields[name]):
            raise ProtocolError(f"{expected.__name__}: field {name!r} does not fit")
    try:
        return expected(**values)
    except TypeError as error:
        raise ProtocolError(f"{expected.__name__}: {error}") from None


def read_record(expected: type[_T], text: str | bytes) -> _T:
    """An instance of `expected` from a JSON text that another process wrote.

    Raises:
        ProtocolError: the text is not JSON, is not within the bounds of `parse_json`, or as for `from_json`.
    """
    try:
        values = parse_json(text)
    except ValueError as problem:
        raise ProtocolError(f"{expected.__name__}: {problem}") from None
    return from_json(expected, values)


def write_record(record: Any) -> str:
    """The JSON text of a dataclass, as `read_record` reads it."""
    return json.dumps(dataclasses.asdict(record))


def _fits(value: object, allowed: frozenset[type]) -> bool:
    # Not `isinstance`: a bool is an int there.
    if type(value) not in allowed:
        return False
    if isinstance(value, list):
        return all(type(item) is str for item in value)
    if float in allowed and isinstance(value, (int, float)):
        return abs(value) <= sys.float_info.max  # no infinity, no NaN, and no whole number that would become one
    return True


def real(facts: Mapping[str, Any], name: str) -> float | None:
    """The finite number under a name; None: there is none."""
    value = facts.get(name)
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    return None
