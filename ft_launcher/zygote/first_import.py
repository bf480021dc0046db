"""Hides what shared imports brought into a process until the script of a fork imports the same: modules, loggers,
filters of warnings. So a script runs until its first import of torch as in a fresh interpreter.

Used by the zygote and in its ranks. A finder at the front of `sys.meta_path` gives everything back. It sees `import`,
`importlib.import_module` and `runpy`, and adds no frame to tracebacks or to the search for a warning's caller, as a
wrapper around `builtins.__import__` would. Does not decide whether the rank may go on as a fork: the function that is
passed to `watch` does.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# Not hidden: `start/script.py` takes care of these, and `__main__` is the script's own.
_OURS = frozenset({"ft_client", "ft_launcher", "rank_monitor", "__main__", "__mp_main__"})


def _root(name: str) -> str:
    return name.partition(".")[0]


class _Reads(type(os.environ)):  # type: ignore[misc]
    """`os.environ` that records which variables are read; a variable that is only passed in a loop is not recorded."""

    def __getitem__(self, name: str) -> str:
        if name in self.__dict__.setdefault("_passing", set()):
            self._passing.discard(name)
        else:
            self.__dict__.setdefault("_read", set()).add(name)
        return super().__getitem__(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        names = list(super().__iter__())
        self.__dict__.setdefault("_passing", set()).update(names)
        return iter(names)


@dataclass
class _LoggerState:
    """A logger as an import left it."""

    logger: logging.Logger
    level: int
    propagate: bool
    disabled: bool
    handlers: list[logging.Handler]
    filters: list[Any]

    @classmethod
    def of(cls, logger: logging.Logger) -> _LoggerState:
        """Returns the present state of a logger."""
        has = logger
        return cls(has, has.level, has.propagate, has.disabled, list(has.handlers), list(has.filters))

    def make_new(self) -> logging.Logger:
        """Resets the logger to the state of a new one and returns it."""
        self.logger.level, self.logger.propagate, self.logger.disabled = logging.NOTSET, True, False
        self.logger.handlers, self.logger.filters = [], []
        return self.logger

    def apply(self) -> None:
        """Applies what the import did to the logger, on top of what the script may have done."""
        self.logger.level = self.level or self.logger.level
        self.logger.propagate = self.propagate and self.logger.propagate
        self.logger.disabled = self.disabled or self.logger.disabled
        self.logger.handlers += [handler for handler in self.handlers if handler not in self.logger.handlers]
        self.logger.filters += [rule for rule in self.filters if rule not in self.logger.filters]


@dataclass
class _Brought:
    """What one import brought, and which other imports it needs; `hidden`: those of its modules that are hidden now."""

    name: str
    needs: list[_Brought] = field(default_factory=list)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    hidden: dict[str, ModuleType] = field(default_factory=dict)
    loggers: dict[str, _LoggerState] = field(default_factory=dict)
    handlers: list[Any] = field(default_factory=list)
    filters: list[Any] = field(default_factory=list)


class Imports(MetaPathFinder):
    """The imports of this process that its forks share. One object lives in a process: `imports`."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        """Variables that Python code read during these imports."""
        self._all: list[_Brought] = []
        self._loggers: dict[str, _LoggerState] = {}
        self._held: dict[str, logging.PlaceHolder] = {}
        self.over = False
        """The script has ended: imports by exit functions are not decided about."""
        self.watch()

    def load(self, name: str) -> None:
        """Imports a module and records what that brought, unless it was done already.

        Raises:
            BaseException: whatever its import raises.
        """
        if any(brought.name == _root(name) for brought in self._all):
            return
        needs: list[str] = []
        self.take_back()
        self.watch(lambda name, whole: needs.append(name))
        brought = _Brought(_root(name))
        modules, loggers = set(sys.modules), set(logging.root.manager.loggerDict)
        handlers, filters = list(logging._handlerList), list(warnings.filters)  # type: ignore[attr-defined]
        usual = os.environ.__class__
        # The object stays the same: modules keep references to `os.environ`.
        os.environ.__class__ = _Reads
        try:
            importlib.import_module(name)
        finally:
            os.environ.__class__ = usual
            self.read |= vars(os.environ).pop("_read", set())
            vars(os.environ).pop("_passing", None)
            known = {module for other in self._all for module in other.modules}
            new = [module for module in sys.modules if module not in modules and module not in known]
            brought.modules = {module: sys.modules[module] for module in new if _is_taken_back(module)}
            given_back = {logger for other in self._all for logger in other.loggers}
            for title, logger in logging.root.manager.loggerDict.items():
                if title not in loggers | given_back and isinstance(logger, logging.Logger):
                    brought.loggers[title] = _LoggerState.of(logger)
            earlier = [found for other in self._all for found in (*other.handlers, *other.filters)]
            now = [*logging._handlerList]  # type: ignore[attr-defined]
            brought.handlers = [found for found in now if found not in handlers and found not in earlier]
            brought.filters = [rule for rule in warnings.filters if rule not in filters and rule not in earlier]
            brought.needs = [other for other in self._all if other.name in needs]
            self.give_back()
            self._all.append(brought)

    def take_back(self) -> None:
        """Hides all recorded imports in this process and in its later forks."""
        for brought in self._all:
            if len(brought.hidden) < len(brought.modules):
                brought.hidden = dict(brought.modules)
            for name in brought.hidden:
                sys.modules.pop(name, None)
            self._loggers |= brought.loggers
        self._held |= _forget_loggers(self._loggers)
        _forget(logging._handlerList, [handler for brought in self._all for handler in brought.handlers])  # type: ignore[attr-defined]
        _forget(warnings.filters, [rule for brought in self._all for rule in brought.filters])
        if self._hides_any():
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            logging.root.manager.loggerClass = self._make_logger  # type: ignore[assignment]
            _filters_changed()

    def watch(
        self,
        asks: Callable[[str, bool], None] = lambda name, whole: None,
        given_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets what is called at the script's first import of each hidden module.

        Args:
            asks: called with the module's name, and whether it is one of those that were loaded by name, just before it
                is given back.
            given_back: called when something has been given back.
        """
        self._asks = asks
        self._given_back = given_back

    def give_back(self) -> None:
        """Gives back all that is still hidden, without calling anything."""
        self.watch()
        for brought in self._all:
            self._give_back(brought)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds hidden modules. A module is given back when it is loaded, not when only its spec is asked for."""
        brought = self._hiding(fullname)
        if brought is None:
            return None
        original = brought.modules[fullname].__spec__
        if original:
            spec = copy.copy(original)
        else:
            spec = ModuleSpec(fullname, None)
        spec.loader = _GivesBack(brought.modules[fullname], lambda: self._imported(fullname, brought))
        return spec

    def hides(self, name: str) -> bool:
        """Whether a module is hidden."""
        return self._hiding(name) is not None

    def loaded(self, name: str) -> ModuleType | None:
        """Returns a module that this process has loaded, hidden or not."""
        brought = self._hiding(name)
        if brought is None:
            return sys.modules.get(name)
        return brought.hidden[name]

    def leads_elsewhere(self, name: str) -> bool:
        """Whether `sys.path` now leads to another file for a hidden module."""
        brought = self._hiding(name)
        if brought:
            spec = brought.modules[name].__spec__
        else:
            spec = None
        if spec is None or "." in name:
            return False
        found = PathFinder.find_spec(name, _before_folder_of(spec))
        if found is not None and found.origin is None:  # a folder without __init__ gives way to a module behind it
            found = PathFinder.find_spec(name)
        return found is not None and found.origin != spec.origin

    def _hiding(self, name: str) -> _Brought | None:
        for brought in self._all:
            if name in brought.hidden:
                return brought
        return None

    def _hides_any(self) -> bool:
        return any(brought.hidden for brought in self._all)

    def _imported(self, fullname: str, brought: _Brought) -> None:
        root = _root(fullname)
        whole = root == brought.name
        self._asks(root, whole)
        if whole:
            self._give_back(brought)
        else:
            shown = {name: module for name, module in brought.hidden.items() if _root(name) == root}
            brought.hidden = {name: module for name, module in brought.hidden.items() if name not in shown}
            sys.modules.update(shown)
            _renew_loggers({name: state for name, state in brought.loggers.items() if _root(name) == root})
        self._given_back()

    def _give_back(self, brought: _Brought) -> None:
        for other in brought.needs:
            self._give_back(other)
        if not brought.hidden:
            return
        # All at once, and no other reference is dropped: each object that is written to costs a fork a page of memory.
        sys.modules.update(brought.hidden)
        brought.hidden = {}
        self._give_back_loggers(brought.loggers)
        logging._handlerList.extend(brought.handlers)  # type: ignore[attr-defined]
        _forget(warnings.filters, brought.filters)
        warnings.filters[:0] = brought.filters  # type: ignore[index]
        _filters_changed()
        if not self._hides_any() and self in sys.meta_path:
            sys.meta_path.remove(self)
            logging.root.manager.loggerClass = None

    def _give_back_loggers(self, states: dict[str, _LoggerState]) -> None:
        """Gives loggers back: as they are, unless the script has made loggers that may be their parents or children."""
        known = logging.root.manager.loggerDict
        roots = set(map(_root, states))
        if roots.isdisjoint(map(_root, known)) and states.keys() <= self._loggers.keys():
            known.update({name: held for name, held in self._held.items() if _root(name) in roots})
            known.update({name: state.logger for name, state in states.items()})
            for name in states:
                del self._loggers[name]
        else:
            _renew_loggers(states)

    def _make_logger(self, name: str) -> logging.Logger:
        """Returns the logger that an import made if the script asks for its name: there must not be two of it."""
        state = self._loggers.pop(name, None)
        if state is None:
            return logging.getLoggerClass()(name)
        return state.make_new()


class _GivesBack(Loader):
    """Loads a hidden module; every other request is passed to the module's own loader."""

    def __init__(self, module: ModuleType, imported: Callable[[], None]) -> None:
        self._module, self._imported = module, imported
        self._spec, self._loader = module.__spec__, getattr(module, "__loader__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module back with all that belongs to it. Fills `module` if a hook made one of its own."""
        self._module.__spec__ = self._spec
        self._imported()
        sys.modules[self._module.__name__] = self._module
        if module is not self._module:
            vars(module).update(vars(self._module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


imports = Imports()


def _is_taken_back(name: str) -> bool:
    return _root(name) not in sys.stdlib_module_names and _root(name) not in _OURS


def _forget(where: Any, what: Sequence[Any]) -> None:
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


def _forget_loggers(states: dict[str, _LoggerState]) -> dict[str, logging.PlaceHolder]:
    """Removes loggers, and the placeholders of their parents, from the list of all loggers.

    Returns:
        The placeholders.
    """
    known = logging.root.manager.loggerDict
    for name, state in states.items():
        if known.get(name) is state.logger:
            del known[name]
        state.logger._cache.clear()  # type: ignore[attr-defined]  # which levels it found to be enabled
    held = {name: entry for name, entry in known.items() if isinstance(entry, logging.PlaceHolder)}
    others = known.keys() - held.keys()
    free = {name: entry for name, entry in held.items() if not any(other.startswith(f"{name}.") for other in others)}
    for name in free:
        del known[name]
    return free


def _renew_loggers(states: dict[str, _LoggerState]) -> None:
    for name, state in states.items():
        if logging.getLogger(name) is state.logger:
            state.apply()
    logging.root.setLevel(logging.root.level)  # has each logger forget which levels it found to be enabled


def _filters_changed() -> None:
    """Has the interpreter read the filters of warnings again, which it caches."""
    with warnings.catch_warnings():
        pass
