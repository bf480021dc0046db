"""The modules that a zygote has imported beside torch, and which of them are hidden.

To hide a module is to remove it from `sys.modules` and from the attributes of its parent package, and to put back the
names of other modules and the variables of the environment that its import changed. A module is given back with all
that its own import would load, and no more.

Used by `first_import.py` in the zygote and in its ranks, which itself hides loggers and filters of warnings.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from ft_launcher.node.zygote import exchanged_names
from ft_launcher.node.zygote.exchanged_names import ExchangedName, Place
from ft_launcher.node.zygote.import_recorder import Part


class HiddenParts:
    """The recorded modules of one process.

    Attributes:
        all: name -> what its import did, in the order in which the imports ended.
    """

    def __init__(self) -> None:
        self.all: dict[str, Part] = {}
        self._hidden: set[str] = set()
        self._set: dict[str, str | None] = {}
        """Variables that imports have set in this process, or removed."""

    def add(self, parts: Mapping[str, Part]) -> None:
        """Adds modules that were imported just now.

        Several modules may have exchanged one name, and the last value may refer to the value before it. So each module
        gets the earlier exchanges of the name, too.
        """
        self.all |= parts
        made = _exchanges(self.all.values())
        for part in parts.values():
            own = {exchange.place: exchange.order for exchange in part.exchanges}
            part.exchanges = [exchange for exchange in made if exchange.order <= own.get(exchange.place, -1)]

    def hide(self) -> None:
        """Hides all modules that are not hidden yet, the last import first."""
        shown = [part for name, part in self.all.items() if name not in self._hidden]
        for exchange in reversed(_exchanges(shown)):
            exchange.undo()
        for name, part in reversed(self.all.items()):
            if name in self._hidden:
                continue
            for variable in reversed(part.environ):
                variable.undo()
            sys.modules.pop(name, None)
            if part.parent is not None and vars(part.parent).get(_own(name)) is part.module:
                del vars(part.parent)[_own(name)]
        self._hidden = set(self.all)

    def hides(self, name: str) -> bool:
        """Returns whether a module is recorded, and hidden now."""
        return name in self._hidden

    def any_hidden(self) -> bool:
        """Returns whether any module is hidden."""
        return bool(self._hidden)

    def needed_by(self, name: str) -> set[str]:
        """Returns all that the import of a module loads: itself, hidden modules that it needs, and others by name."""
        return closure([name], {known: part.needs for known, part in self.all.items()}, self._hidden)

    def read_by(self, names: Collection[str]) -> set[str]:
        """Returns the variables of the environment that were read when these modules were imported."""
        return {variable for name in names if name in self._hidden for variable in self.all[name].reads}

    def have_set(self, name: str) -> bool:
        """Returns whether a variable of the environment has the value that the import of a recorded module has set."""
        return name in self._set and os.environ.get(name) == self._set[name]

    def exchanged_by_script(self, names: Collection[str]) -> list[str]:
        """Returns the names that these modules would exchange and that the script has exchanged itself before.

        Such a name would lose the script's value, which it would keep in a fresh interpreter.
        """
        wanted = [part for name, part in self.all.items() if name in names and name in self._hidden]
        known: dict[Place, list[ExchangedName]] = {}
        for exchange in _exchanges(self.all.values()):
            known.setdefault(exchange.place, []).append(exchange)
        places = dict.fromkeys(exchange.place for exchange in _exchanges(wanted))
        return [str(place) for place in places if _is_of_another(known[place])]

    def show(self, names: Collection[str]) -> list[Part]:
        """Gives back the hidden modules among these, and does again what their imports did to the process: exit
        functions, variables, exchanged names. Returns what was given back."""
        shown = [part for name, part in self.all.items() if name in names and name in self._hidden]
        for part in shown:
            self._hidden.discard(part.name)
            sys.modules[part.name] = part.module
            if part.parent is not None:
                vars(part.parent)[_own(part.name)] = part.module
            for function, args, kwargs in part.exits:
                atexit.register(function, *args, **kwargs)
            for variable in part.environ:
                variable.apply()
                self._set[variable.name] = variable.after
        for exchange in _exchanges(shown):
            exchange.redo()
        return shown


def closure(names: Iterable[str], needs: Mapping[str, Collection[str]], within: Collection[str]) -> set[str]:
    """Returns `names` and all that they need, directly or not.

    Args:
        names: to begin with.
        needs: name -> the names that it needs.
        within: names whose needs are followed. Others are returned, but not followed.
    """
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            if name in within:
                left += needs.get(name, ())
    return found


def _exchanges(parts: Iterable[Part]) -> list[ExchangedName]:
    """Returns the names that modules have exchanged, in the order in which they did."""
    return exchanged_names.in_order(exchange for part in parts for exchange in part.exchanges)


def _is_of_another(exchanges: Sequence[ExchangedName]) -> bool:
    """Returns whether a name has a value that is neither the one before these imports nor one that they gave it."""
    first, present = exchanges[0], exchanges[0].present()
    known = [first.before, *(exchange.after for exchange in exchanges)]
    return not any(exchanged_names.same(present, value) for value in known)


def _own(name: str) -> str:
    """Returns the last part of a module's name: the name of the attribute that its package has."""
    return name.rpartition(".")[2]
