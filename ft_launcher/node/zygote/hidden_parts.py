"""The modules that a zygote has imported beside torch, and which of them are hidden: from `sys.modules`, from the
attributes of their parent packages, and the names of other modules that they exchanged. Each is given back with all
that its own import would load.

Used by `first_import.py` in the zygote and in its ranks. Loggers and filters of warnings are not its concern.
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
    """See above. `all`: in the order in which their imports ended."""

    def __init__(self) -> None:
        self.all: dict[str, Part] = {}
        self._hidden: set[str] = set()
        self._set: dict[str, str | None] = {}
        """Variables that imports have set in this process, or removed."""

    def add(self, parts: Mapping[str, Part]) -> None:
        """Adds modules that were imported just now.

        Of a name that several modules have exchanged, the last value may hold the one before it: so a module comes with
        the exchanges before its own.
        """
        self.all |= parts
        made = _exchanges(self.all.values())
        for part in parts.values():
            own = {exchange.place: exchange.order for exchange in part.exchanges}
            part.exchanges = [exchange for exchange in made if exchange.order <= own.get(exchange.place, -1)]

    def hide(self) -> None:
        """Hides all of them."""
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
        """Whether a module is one of them, and hidden now."""
        return name in self._hidden

    def any_hidden(self) -> bool:
        """Whether one is hidden."""
        return bool(self._hidden)

    def needed_by(self, name: str) -> set[str]:
        """Returns what the import of a module loads, itself and modules that are none of these included."""
        return closure([name], {known: part.needs for known, part in self.all.items()}, self._hidden)

    def read_by(self, names: Collection[str]) -> set[str]:
        """Returns the variables that were read when these modules were imported."""
        return {variable for name in names if name in self._hidden for variable in self.all[name].reads}

    def have_set(self, name: str) -> bool:
        """Whether a variable of the environment is as the import of one of them has set it."""
        return name in self._set and os.environ.get(name) == self._set[name]

    def exchanged_by_script(self, names: Collection[str]) -> list[str]:
        """Returns the names that these modules would exchange, and that the script has exchanged before."""
        wanted = [part for name, part in self.all.items() if name in names and name in self._hidden]
        known: dict[Place, list[ExchangedName]] = {}
        for exchange in _exchanges(self.all.values()):
            known.setdefault(exchange.place, []).append(exchange)
        places = dict.fromkeys(exchange.place for exchange in _exchanges(wanted))
        return [str(place) for place in places if _is_of_another(known[place])]

    def show(self, names: Collection[str]) -> list[Part]:
        """Gives back those of the modules that are hidden, and does what their imports did with the process."""
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
    """Returns `names` and all that they need, directly or not. What is not `within` is returned and not followed."""
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
    return exchanged_names.in_order(exchange for part in parts for exchange in part.exchanges)


def _is_of_another(exchanges: Sequence[ExchangedName]) -> bool:
    """Returns whether a name has another value than before these imports and than any that they gave it."""
    first, present = exchanges[0], exchanges[0].present()
    known = [first.before, *(exchange.after for exchange in exchanges)]
    return not any(exchanged_names.same(present, value) for value in known)


def _own(name: str) -> str:
    return name.rpartition(".")[2]
