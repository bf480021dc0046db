"""Names of modules and classes to which an import gave other values ("exchanged"): found, put back, exchanged again.

For example, the import of `torch._dynamo` replaces `torch.manual_seed`. A script would see the new function before it
has imported `torch._dynamo`. So the zygote puts the previous values back when it hides the module, and a rank exchanges
the names again when its script imports the module.

- `module_trial.py` compares all modules before and after the imports that it tries (`Holdings`).
- `import_recorder.py` then looks at the names that were found, after each module's code (`WatchedNames`): so it knows
  which module exchanged which name.
- `hidden_parts.py` puts values back and exchanges them again, in the zygote and in its ranks.

What is held elsewhere is not compared: in instances, in dictionaries, in tables of C++ such as torch's dispatch tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple

ABSENT = object()
"""The value of a name that is not there."""
_OF_INTERPRETER = frozenset(
    {"__builtins__", "__annotations__", "__annotations_cache__", "__warningregistry__"}
    | {"__slotnames__", "__protocol_attrs__", "__non_callable_proto_members__"}
)
"""Names that Python itself adds at their first use: by `warnings`, `copyreg`, `typing` and at a look-up."""
_COMPARED_BY_VALUE = (bool, int, float, complex, str, bytes)
_orders = count()


class Place(NamedTuple):
    """A name: of a module, or of a class (`owner`) that is a name of a module. `owner` is empty for the first."""

    module: str
    owner: str
    name: str

    def __str__(self) -> str:
        return ".".join(word for word in self if word)


_FOUND_AGAIN = Place("tempfile", "", "tempdir")


@dataclass(frozen=True)
class ExchangedName:
    """One name to which an import gave another value.

    Attributes:
        place: the name.
        owner: the module or class that has the name.
        before, after: the values before and after the import; `ABSENT`: the name was not there.
        order: counts the exchanges of this process.
    """

    place: Place
    owner: Any
    before: object
    after: object
    order: int

    def present(self) -> object:
        """Returns the value that the name has now."""
        return _value(self.owner, self.place.name)

    def undo(self) -> None:
        """Gives the name the value of before the import, unless it was exchanged again since."""
        if same(self.present(), self.after):
            _put(self.owner, self.place.name, self.before)

    def redo(self) -> None:
        """Gives the name the value of after the import, unless it has another than that of before the import."""
        if same(self.present(), self.before):
            _put(self.owner, self.place.name, self.after)


class Holdings:
    """The values of all names of modules and of the classes that they define, at the time the object is made.

    Args:
        modules: `sys.modules`, or a part of it.
    """

    def __init__(self, modules: Mapping[str, object]) -> None:
        self._held: dict[tuple[str, str], tuple[Any, dict[str, object]]] = {}
        seen: set[int] = set()
        for title, module in modules.items():
            if not _is_a(module, ModuleType) or id(module) in seen:
                continue
            seen.add(id(module))
            names = dict(vars(module))
            self._held[title, ""] = (module, names)
            for name, value in names.items():
                if _is_a(value, type) and vars(value).get("__module__") == title:
                    self._held[title, name] = (value, dict(vars(value)))

    def exchanges(self) -> list[ExchangedName]:
        """Returns the names that have other values now, with both values."""
        found = []
        for (module, title), (owner, before) in self._held.items():
            now = dict(vars(owner))
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for name in now.keys() | before.keys():
                place, was, value = Place(module, title, name), before.get(name, ABSENT), now.get(name, ABSENT)
                if not same(was, value) and _counts(place, owner, was, value):
                    found.append(ExchangedName(place, owner, was, value, next(_orders)))
        return found


class WatchedNames:
    """A few names that are looked at again and again: quick enough to be done after each module's code.

    Args:
        places: the names. Those whose module is not loaded, or has no such class, are left out.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        owners = {place: _owner(place) for place in places}
        self._owners = {place: owner for place, owner in owners.items() if owner is not None}
        self._values = {place: _value(owner, place.name) for place, owner in self._owners.items()}

    def exchanges(self) -> list[ExchangedName]:
        """Returns what was exchanged since the last call."""
        found = []
        for place, owner in self._owners.items():
            before, after = self._values[place], _value(owner, place.name)
            if not same(before, after):
                self._values[place] = after
                found.append(ExchangedName(place, owner, before, after, next(_orders)))
        return found


def _owner(place: Place) -> Any:
    """Returns the module or class that has a name; None: it is not loaded."""
    module = sys.modules.get(place.module)
    if not _is_a(module, ModuleType):
        return None
    if not place.owner:
        return module
    return vars(module).get(place.owner)


def _value(owner: Any, name: str) -> object:
    """Returns the value of a name as the module or class itself has it; ABSENT: it has none. Calls no code of
    theirs."""
    return vars(owner).get(name, ABSENT)


def _put(owner: Any, name: str, value: object) -> None:
    """Sets a name of a module or class, or removes it, past what their own classes may do with that."""
    if isinstance(owner, ModuleType):
        if value is ABSENT:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = value
    elif value is ABSENT:
        type.__delattr__(owner, name)
    else:
        type.__setattr__(owner, name, value)


def _counts(place: Place, owner: Any, before: object, after: object) -> bool:
    """Returns whether an exchange is one that has to be hidden.

    Five kinds need not, or must not, be put back:
    - the folder of `tempfile`, which each rank looks for again,
    - what Python itself keeps in modules and classes,
    - a module as a name of its package, which `hidden_parts.py` hides,
    - a name that a module with a class of its own makes when the name is asked for (`torch.ops`),
    - a private value that is no function or class. A module keeps its own state in such values, and would break if one
      of several were put back.
    """
    name = place.name
    if not isinstance(name, str) or name in _OF_INTERPRETER or place == _FOUND_AGAIN:
        return False
    if _is_a(owner, ModuleType):
        if before is ABSENT and type(owner) is not ModuleType:
            return False
        if _is_part(place, before) or _is_part(place, after):
            return False
    return not name.startswith("_") or name.startswith("__") or callable(before) or callable(after)


def _is_part(place: Place, value: object) -> bool:
    """Returns whether a value is the submodule of this name, which its package has as an attribute."""
    return _is_a(value, ModuleType) and sys.modules.get(f"{place.module}.{place.name}") is value


def _is_a(value: Any, kind: type) -> bool:
    """Returns whether a value is an instance of a class. Not by `isinstance`, at which some objects load what they
    stand for."""
    return issubclass(type(value), kind)


def same(one: object, other: object) -> bool:
    """Returns whether two values of a name are one object, or equal numbers or texts."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _COMPARED_BY_VALUE and one == other


def in_order(exchanges: Iterable[ExchangedName]) -> list[ExchangedName]:
    """Returns exchanges in the order in which they were made, each once."""
    found = {exchange.order: exchange for exchange in exchanges}
    return [found[order] for order in sorted(found)]
