"""The modules that a zygote has imported beside torch, and which of them are hidden: from `sys.modules`, and from the
attributes of their parent packages. Each is given back with all that its own import would load.

Used by `first_import.py` in the zygote and in its ranks. Loggers and filters of warnings are not its concern.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Iterable, Mapping

from ft_launcher.zygote.import_recorder import Part


class HiddenParts:
    """See above. `all`: in the order in which their imports ended."""

    def __init__(self) -> None:
        self.all: dict[str, Part] = {}
        self._hidden: set[str] = set()
        self._set: dict[str, str | None] = {}
        """Variables that imports have set in this process, or removed."""

    def hide(self) -> None:
        """Hides all of them."""
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


def _own(name: str) -> str:
    return name.rpartition(".")[2]
