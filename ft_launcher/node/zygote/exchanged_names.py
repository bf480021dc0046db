"""Names of modules and of their classes that an import gave other values: found by comparison, put back, given again.

`torch._dynamo`, for example, exchanges `torch.manual_seed` when it is imported. A script would see that before it has
imported `torch._dynamo`, so the zygote puts the former values back with what it hides.

`module_trial.py` compares all modules before and after the imports that it tries (`Holdings`). `import_recorder.py`
then looks at the names found so after each module's code (`WatchedNames`), and tells which module exchanged which.
`hidden_parts.py` puts values back and gives them again, in the zygote and in its ranks.

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
    """One name that an import gave another value. `order`: of all exchanges of this process."""

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
    """What these modules and their classes hold now: the values of their names.

    Args:
        modules: `sys.modules`, or some of it.
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
    """A few names that are looked at again and again. A name whose module is not loaded, or has no such class, is not.

    Args:
        places: of `Holdings.exchanges`, for example.
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
    """Whether an exchange is one of those that are hidden.

    Five kinds are not: the folder of `tempfile`, which each rank looks for again; what Python itself keeps in modules
    and classes; a module as a name of its package, which `hidden_parts.py` hides; a name that a module of a class of
    its own makes when it is asked for (`torch.ops`); and a private value that is no function or class, in which a
    module keeps its own state: to put back one name of a state that has several would break it.
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
    return _is_a(value, ModuleType) and sys.modules.get(f"{place.module}.{place.name}") is value


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is an instance of a class. Some objects answer `isinstance` by loading what they stand for."""
    return issubclass(type(value), kind)


def same(one: object, other: object) -> bool:
    """Whether two values of a name are one object, or numbers or texts that are equal."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in _COMPARED_BY_VALUE and one == other


def in_order(exchanges: Iterable[ExchangedName]) -> list[ExchangedName]:
    """Returns exchanges in the order in which they were made, each once."""
    found = {exchange.order: exchange for exchange in exchanges}
    return [found[order] for order in sorted(found)]
