"""Marks on the fields of events: how much of a field `ft_launcher bundle` passes on to others. Pure.

The mark is part of the field's type, as in `rank: Shared[int]`. A field without a mark never leaves this machine, and
`tests/ft_launcher/record/test_events.py` fails for it. Only `ft_launcher/tools/bundle/allowed.py` reads the marks: the
journal holds every field whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, TypeVar, get_type_hints

_T = TypeVar("_T")


class Sharing(Enum):
    """How much of a field is passed on; `Shared` and the other marks below say it of a field."""

    WHOLE = "whole"
    PART = "part"
    PART_OR_TEXT = "part or text"
    TEXT = "text"
    NEVER = "never"


Shared = Annotated[_T, Sharing.WHOLE]
"""The value as it is: numbers, names, and texts that the launcher wrote without quoting anybody."""
InPart = Annotated[_T, Sharing.PART]
"""Only the numbers, the names and the places in a program that are in the value. `tools/bundle/allowed.py` has a rule
for each such field, by the name of the field; a field without a rule is left out."""
InPartOrText = Annotated[_T, Sharing.PART_OR_TEXT]
"""The value as it is where the user asks for texts (`--with-texts`), else a part of it as with `InPart`."""
FreeText = Annotated[_T, Sharing.TEXT]
"""The value as it is where the user asks for texts, else nothing: free words of ranks, users and commands."""
Private = Annotated[_T, Sharing.NEVER]
"""Nothing: command lines, paths, and what other fields have."""


@functools.cache
def sharing_of(event: type[Any]) -> Mapping[str, Sharing]:
    """Returns the mark of each field of an event by the field's name; a field without a mark is missing.

    Evaluates the types of all fields, which takes longer than a launcher may need to start: only a bundle asks.
    """
    hints = get_type_hints(event, include_extras=True)
    found = {}
    for field in fields(event):
        for mark in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(mark, Sharing):
                found[field.name] = mark
    return found
