"""Hides what the zygote has imported from the scripts of ranks, until a script imports the same.

A rank is a fork of a process that has imported torch. Its script must not notice: until its first import of torch it
runs as in a fresh interpreter. So modules, loggers, handlers and filters of warnings that imports brought are taken out
of the tables in which a script would find them.

    zygote:  load (torch), recording (other modules) -> undo: all is hidden, for all later ranks
    rank:    the script imports a hidden module -> the function of `watch` decides whether the rank may go on as a fork
             -> what that import brought is given back, with all that it needs

A finder at the front of `sys.meta_path` (`Imports.find_spec`) sees the script's imports: by `import`, by
`importlib.import_module` and by `runpy`. It adds no frame to tracebacks, nor to the search for a warning's caller,
which a wrapper around `builtins.__import__` would do.

Two kinds of imports are kept apart. What `load` imports (torch) is given back as a whole: torch's modules refer to each
other, and a part of them would be of no use. What was imported in `recording` is given back one module at a time, with
the modules that it needs (`hidden_parts.py`), since a rank's script may import any part of it.

Used by the zygote and in its ranks. `start_again.py` decides what a script may have changed before the import. In the
zygote there is one thread. In a rank any thread of the script may import, under the lock that Python's import system
holds for each module.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ft_launcher.node.zygote import import_recorder, logger_state
from ft_launcher.node.zygote.exchanged_names import Place
from ft_launcher.node.zygote.hidden_parts import HiddenParts
from ft_launcher.node.zygote.import_recorder import ImportRecorder, Part, parents, root
from ft_launcher.node.zygote.logger_state import LoggerState

Asks = Callable[[str, Collection[str], bool], None]
"""Called with the name of a hidden module that the script imports, with the variables that Python code read when it was
imported, and with whether its code in C may have read others."""
_OURS = frozenset({"ft_client", "ft_launcher", "rank_monitor", "__main__", "__mp_main__"})
"""Packages that are not hidden: the client takes care of its own modules (`rank/start/script.py`), and `__main__` is
the script."""


@dataclass
class _Brought:
    """What one of the imports of `load` brought.

    Attributes:
        name: the top-level package that was imported.
        needs: the other imports of `load` that this one needs.
        modules: all modules that it brought.
        hidden: those of its modules that are hidden now.
        loggers, handlers, filters: of logging and warnings, that it brought.
    """

    name: str
    needs: list[_Brought] = field(default_factory=list)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    hidden: dict[str, ModuleType] = field(default_factory=dict)
    loggers: dict[str, LoggerState] = field(default_factory=dict)
    handlers: list[Any] = field(default_factory=list)
    filters: list[Any] = field(default_factory=list)


class Imports(MetaPathFinder):
    """The imports of this process that its forks share. A process has one object: `imports`.

    Attributes:
        read: variables of the environment that Python code read during the imports of `load`.
        parts: the modules that were imported later (`recording`), each with what its own import did.
        over: whether the script has ended: imports by exit functions are not decided about.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._all: list[_Brought] = []
        self._loggers: dict[str, LoggerState] = {}
        """The hidden loggers, by name."""
        self._held: dict[str, logging.PlaceHolder] = {}
        """The hidden placeholders of their parents, by name."""
        self.parts = HiddenParts()
        self.over = False
        self.watch()

    def load(self, name: str) -> None:
        """Imports a module, in the zygote, and records what the import brought; does nothing if it was imported
        already.

        Raises:
            BaseException: whatever the import raises.
        """
        if any(brought.name == root(name) for brought in self._all):
            return
        needs: list[str] = []
        self.undo()
        self.watch(lambda name, read, whole: needs.append(name))
        brought = _Brought(root(name))
        modules, loggers = set(sys.modules), set(logging.root.manager.loggerDict)
        handlers, filters = list(logging._handlerList), list(warnings.filters)  # type: ignore[attr-defined]
        usual = import_recorder.watch_reads()
        try:
            importlib.import_module(name)
        finally:
            self.read |= import_recorder.end_reads(usual)
            known = {module for other in self._all for module in other.modules}
            new = [module for module in sys.modules if module not in modules and module not in known]
            brought.modules = {module: sys.modules[module] for module in new if _is_taken_back(module)}
            given_back = {logger for other in self._all for logger in other.loggers}
            for title, logger in logging.root.manager.loggerDict.items():
                if title not in loggers | given_back and isinstance(logger, logging.Logger):
                    brought.loggers[title] = LoggerState.of(logger)
            earlier = [found for other in self._all for found in (*other.handlers, *other.filters)]
            now = [*logging._handlerList]  # type: ignore[attr-defined]
            brought.handlers = [found for found in now if found not in handlers and found not in earlier]
            brought.filters = [rule for rule in warnings.filters if rule not in filters and rule not in earlier]
            brought.needs = [other for other in self._all if other.name in needs]
            self.give_back()
            self._all.append(brought)

    @contextmanager
    def recording(
        self,
        observe: import_recorder.Observe = tuple,
        watched: Sequence[Place] = (),
    ) -> Iterator[ImportRecorder]:
        """Returns a context in which imports of modules are recorded one by one, for `parts`. Nothing is hidden in it.

        Args:
            observe, watched: of `ImportRecorder`.
        """
        self.give_back()
        recorder = ImportRecorder(_is_taken_back, observe, watched)
        try:
            with recorder:
                yield recorder
        finally:
            self.parts.add(recorder.parts)

    def undo(self) -> None:
        """Hides all that was imported by `load` and in `recording`, in this process and in its later forks.

        Called by the zygote when all its imports are done: each fork then begins with everything hidden. A second call
        hides again what was given back meanwhile.
        """
        for brought in self._all:
            if len(brought.hidden) < len(brought.modules):
                brought.hidden = dict(brought.modules)
            for name in brought.hidden:
                sys.modules.pop(name, None)
            self._loggers |= brought.loggers
        self.parts.hide()
        for part in self.parts.all.values():
            self._loggers |= part.loggers
        self._held |= logger_state.forget(self._loggers)
        _forget(logging._handlerList, [handler for source in self._sources() for handler in source.handlers])  # type: ignore[attr-defined]
        _forget(warnings.filters, [rule for source in self._sources() for rule in source.filters])
        if self._hides_any():
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            logging.root.manager.loggerClass = self._make_logger  # type: ignore[assignment]
            _filters_changed()

    def watch(
        self,
        asks: Asks = lambda name, read, whole: None,
        given_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets the functions that are called at the script's first import of each hidden module. Called in a rank, by
        `FirstImport.begin`.

        Args:
            asks: called just before a module is given back. May replace the process, see `Asks`.
            given_back: called when something has been given back.
        """
        self._asks = asks
        self._given_back = given_back

    def give_back(self) -> None:
        """Gives back all that is still hidden, without calling the functions of `watch`.

        For the zygote, before it imports something more: the new modules must find the old ones.
        """
        self.watch()
        for brought in self._all:
            self._give_back(brought)
        self._show(list(self.parts.all))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds hidden modules, for the import system. The module is given back when it is loaded, not when only its
        spec is asked for."""
        module, imported = self._hidden(fullname)
        if imported is None:
            return None
        original = getattr(module, "__spec__", None)
        if original:
            spec: ModuleSpec = copy.copy(original)
        else:
            spec = ModuleSpec(fullname, None)
        spec.loader = _GivesBack(fullname, module, imported)
        return spec

    def _hidden(self, name: str) -> tuple[Any, Callable[[], None] | None]:
        """Returns a hidden module, and the function that gives it back; None and None if it is not hidden."""
        if self.parts.hides(name):
            return self.parts.all[name].module, lambda: self._part_imported(name)
        brought = self._hiding(name)
        if brought is not None:
            return brought.modules[name], lambda: self._imported(name, brought)
        return None, None

    def hides(self, name: str) -> bool:
        """Returns whether a module is hidden."""
        return self._hidden(name)[1] is not None

    def loaded(self, name: str) -> ModuleType | None:
        """Returns a module that this process has loaded, hidden or not."""
        module, _ = self._hidden(name)
        return module or sys.modules.get(name)

    def leads_elsewhere(self, name: str) -> bool:
        """Returns whether `sys.path` now leads to another file for a hidden module: the script has changed the path."""
        module, _ = self._hidden(name)
        spec = getattr(module, "__spec__", None)
        if spec is None or "." in name:
            return False
        found = PathFinder.find_spec(name, _before_folder_of(spec))
        if found is not None and found.origin is None:  # a folder without __init__ gives way to a module behind it
            found = PathFinder.find_spec(name)
        return found is not None and found.origin != spec.origin

    def _hiding(self, name: str) -> _Brought | None:
        """Returns the import of `load` that brought a module which is hidden now; None: there is none."""
        for brought in self._all:
            if name in brought.hidden:
                return brought
        return None

    def _hides_any(self) -> bool:
        """Returns whether anything is still hidden."""
        return self.parts.any_hidden() or any(brought.hidden for brought in self._all)

    def _sources(self) -> list[_Brought | Part]:
        """Returns all that brought handlers and filters: the imports of `load`, and the recorded modules."""
        return [*self._all, *self.parts.all.values()]

    def _imported(self, fullname: str, brought: _Brought) -> None:
        """Handles the script's import of a module that `load` brought: asks, then gives back what belongs to it."""
        package = root(fullname)
        if package == brought.name:
            self._asks(package, self.read, True)
            self._give_back(brought)
        else:
            self._asks(package, (), False)
            self._give_back_package(package, brought)
        self._given_back()

    def _give_back_package(self, package: str, brought: _Brought) -> None:
        """Gives back the modules of one package among those that an import brought, such as typing_extensions among
        torch's."""
        shown = {name: module for name, module in brought.hidden.items() if root(name) == package}
        brought.hidden = {name: module for name, module in brought.hidden.items() if name not in shown}
        sys.modules.update(shown)
        logger_state.renew({name: state for name, state in brought.loggers.items() if root(name) == package})

    def _part_imported(self, fullname: str) -> None:
        """Handles the script's import of a recorded module: asks, then gives back all that its import would load."""
        names = self.parts.needed_by(fullname)
        self._asks(fullname, self.parts.read_by(names), False)
        for name in names:
            brought = self._hiding(name)
            if brought is not None and root(name) == brought.name:
                self._give_back(brought)
            elif brought is not None:
                self._give_back_package(root(name), brought)
        self._show(names)
        self._given_back()

    def _show(self, names: Collection[str]) -> None:
        """Gives back recorded modules with these names, and what their imports brought beside modules."""
        for part in self.parts.show(names):
            self._give_back_loggers(part.loggers)
            self._give_back_rules(part)
        self._end_if_none()

    def _give_back(self, brought: _Brought) -> None:
        """Gives back all that an import of `load` brought, and the imports that it needs."""
        for other in brought.needs:
            self._give_back(other)
        if not brought.hidden:
            return
        # All at once, and no other reference is dropped: each object that is written to costs a fork a page of memory.
        sys.modules.update(brought.hidden)
        brought.hidden = {}
        self._give_back_loggers(brought.loggers)
        self._give_back_rules(brought)
        self._end_if_none()

    def _give_back_rules(self, source: _Brought | Part) -> None:
        """Gives back handlers of log lines and filters of warnings."""
        logging._handlerList.extend(source.handlers)  # type: ignore[attr-defined]
        if source.filters:
            _forget(warnings.filters, source.filters)
            warnings.filters[:0] = source.filters  # type: ignore[index]
            _filters_changed()

    def _end_if_none(self) -> None:
        """Removes the finder when nothing is hidden any more: imports cost as much as in a fresh interpreter then."""
        if not self._hides_any() and self in sys.meta_path:
            sys.meta_path.remove(self)
            logging.root.manager.loggerClass = None

    def _give_back_loggers(self, states: dict[str, LoggerState]) -> None:
        """Gives loggers back.

        They go back as they are, unless the script has made loggers that may be their parents or children: then each
        is linked anew.
        """
        known = logging.root.manager.loggerDict
        roots = set(map(root, states))
        if roots.isdisjoint(map(root, known)) and states.keys() <= self._loggers.keys():
            above = set[str]().union(*map(parents, states))
            known.update({name: held for name, held in self._held.items() if name in above})
            known.update({name: state.logger for name, state in states.items()})
            for name in states:
                del self._loggers[name]
        else:
            logger_state.renew(states)

    def _make_logger(self, name: str) -> logging.Logger:
        """Returns the logger for a name that the script asks for: a hidden one, reset to a new one's state, if there is
        one. There must not be two loggers of one name once the module is given back."""
        state = self._loggers.pop(name, None)
        if state is None:
            return logging.getLoggerClass()(name)
        return state.make_new()


class _GivesBack(Loader):
    """Loads a hidden module; every other request is passed to the module's own loader.

    Args:
        module: what is in `sys.modules` under `name` after its import, which need not be a module.
    """

    def __init__(self, name: str, module: Any, imported: Callable[[], None]) -> None:
        self._name, self._module, self._imported = name, module, imported
        self._spec, self._loader = getattr(module, "__spec__", None), getattr(module, "__loader__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns the hidden module itself; None: a new one, where what is in `sys.modules` is no module."""
        if isinstance(self._module, ModuleType):
            return self._module
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module back with all that belongs to it. Fills `module` if a hook made one of its own."""
        self._imported()
        sys.modules[self._name] = self._module
        if isinstance(self._module, ModuleType):
            self._module.__spec__ = self._spec
            if module is not self._module:
                vars(module).update(vars(self._module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


imports = Imports()
"""The one object of this process. A fork has its parent's, with all that is hidden."""


def _is_taken_back(name: str) -> bool:
    """Returns whether a module is to be hidden. Python's own modules are not: a script may find any of them loaded in a
    fresh interpreter, too."""
    return root(name) not in sys.stdlib_module_names and root(name) not in _OURS


def _forget(where: Any, what: Sequence[Any]) -> None:
    """Removes entries from a list in place: other code holds references to the list."""
    where[:] = [entry for entry in where if entry not in what]


def _before_folder_of(spec: ModuleSpec) -> list[str]:
    """Returns the entries of `sys.path` before the one that a module was found in."""
    place = Path(spec.origin or "").parent
    if spec.submodule_search_locations is not None:
        place = place.parent
    folder = str(place)
    if folder in sys.path:
        return sys.path[: sys.path.index(folder)]
    return sys.path


def _filters_changed() -> None:
    """Has the interpreter read the filters of warnings again, which it caches."""
    with warnings.catch_warnings():
        pass
