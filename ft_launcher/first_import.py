"""What imports bring into a process, taken back in a fork until its script imports the same: modules, loggers, filters
of warnings. So a script runs until its first import of torch as in a fresh interpreter.

A finder at the front of `sys.meta_path` gives everything back. It sees `import`, `importlib.import_module` and `runpy`,
and leaves no frame in tracebacks and in the search for who is warned, as a wrapper around `builtins.__import__` would.
It does not decide whether the rank may go on as a fork: `take_back` is given the function that does.
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
from types import ModuleType
from typing import Any

_OURS = frozenset({"ft_client", "ft_launcher", "rank_monitor", "__main__", "__mp_main__"})


def _root(name: str) -> str:
    return name.partition(".")[0]


class _Reads(type(os.environ)):  # type: ignore[misc]
    """The environment, while it writes down which variables are read; one that only goes by in a loop is not."""

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
        """Its present state."""
        has = logger
        return cls(has, has.level, has.propagate, has.disabled, list(has.handlers), list(has.filters))

    def make_new(self) -> logging.Logger:
        """The logger, as if it had just been made."""
        self.logger.level, self.logger.propagate, self.logger.disabled = logging.NOTSET, True, False
        self.logger.handlers, self.logger.filters = [], []
        return self.logger

    def apply(self) -> None:
        """Does what the import did, to what the script may have done before."""
        self.logger.level = self.level or self.logger.level
        self.logger.propagate = self.propagate and self.logger.propagate
        self.logger.disabled = self.disabled or self.logger.disabled
        self.logger.handlers += [one for one in self.handlers if one not in self.logger.handlers]
        self.logger.filters += [one for one in self.filters if one not in self.logger.filters]


@dataclass
class _Brought:
    """What one import brought, and which other imports it made."""

    name: str
    needs: list[_Brought] = field(default_factory=list)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    loggers: dict[str, _LoggerState] = field(default_factory=dict)
    handlers: list[Any] = field(default_factory=list)
    filters: list[Any] = field(default_factory=list)


class Imports(MetaPathFinder):
    """The imports of this process that its forks share. One object lives in a process: `imports`."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        """Variables that Python code read during these imports."""
        self._all: list[_Brought] = []
        self._hidden: dict[str, _Brought] = {}
        self._loggers: dict[str, _LoggerState] = {}
        self.over = False
        """The script has ended: whatever exit functions import is asked about no more."""
        self._asks: Callable[[str, bool], None] = lambda name, all_of_it: None

    def load(self, name: str) -> None:
        """Imports a module, unless that was done already.

        Raises:
            BaseException: whatever its import raises.
        """
        if any(one.name == _root(name) for one in self._all):
            return
        needs: list[str] = []
        self.take_back(lambda name, all_of_it: needs.append(name))
        brought = _Brought(_root(name))
        modules, loggers = set(sys.modules), set(logging.root.manager.loggerDict)
        handlers, filters = list(logging._handlerList), list(warnings.filters)  # type: ignore[attr-defined]
        usual = os.environ.__class__
        os.environ.__class__ = _Reads
        try:
            importlib.import_module(name)
        finally:
            os.environ.__class__ = usual
            self.read |= vars(os.environ).pop("_read", set())
            vars(os.environ).pop("_passing", None)
            known = {module for one in self._all for module in one.modules}
            new = [module for module in sys.modules if module not in modules and module not in known]
            brought.modules = {module: sys.modules[module] for module in new if _is_taken_back(module)}
            given_back = {logger for one in self._all for logger in one.loggers}
            for title, logger in logging.root.manager.loggerDict.items():
                if title not in loggers | given_back and isinstance(logger, logging.Logger):
                    brought.loggers[title] = _LoggerState.of(logger)
            earlier = [one for other in self._all for one in (*other.handlers, *other.filters)]
            now = [*logging._handlerList]  # type: ignore[attr-defined]
            brought.handlers = [one for one in now if one not in handlers and one not in earlier]
            brought.filters = [one for one in warnings.filters if one not in filters and one not in earlier]
            brought.needs = [one for one in self._all if one.name in needs]
            self.give_back()
            self._all.append(brought)

    def take_back(self, asks: Callable[[str, bool], None]) -> None:
        """Makes this process look as if nothing of it had been imported.

        Args:
            asks: called at the first import of each with the module's name, and whether it is one of those that were
                loaded by name, just before it is given back.
        """
        self._asks = asks
        for brought in self._all:
            for name in brought.modules:
                if sys.modules.pop(name, None) is not None:
                    self._hidden[name] = brought
            self._loggers |= brought.loggers
        _forget_loggers(self._loggers)
        _forget(logging._handlerList, [one for brought in self._all for one in brought.handlers])  # type: ignore[attr-defined]
        _forget(warnings.filters, [one for brought in self._all for one in brought.filters])
        if self._hidden:
            sys.meta_path.insert(0, self)
            logging.root.manager.loggerClass = self._make_logger  # type: ignore[assignment]
            _filters_changed()

    def give_back(self) -> None:
        """Gives back what is still taken, and asks nobody."""
        self._asks = lambda name, all_of_it: None
        for brought in self._all:
            self._give_back(brought)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds what was taken back; it is given back when it is loaded, not when somebody asks whether it is there."""
        brought = self._hidden.get(fullname)
        if brought is None:
            return None
        original = brought.modules[fullname].__spec__
        spec = copy.copy(original) if original else ModuleSpec(fullname, None)
        spec.loader = _GivesBack(brought.modules[fullname], lambda: self._imported(fullname, brought))
        return spec

    def hides(self, name: str) -> bool:
        """Whether a module was taken back and not imported since."""
        return name in self._hidden

    def leads_elsewhere(self, name: str) -> bool:
        """Whether `sys.path` now leads to another file for a module that was taken back."""
        brought = self._hidden.get(name)
        spec = brought.modules[name].__spec__ if brought else None
        found = PathFinder.find_spec(name) if spec and "." not in name else None
        return bool(spec and found and found.origin != spec.origin)

    def _imported(self, fullname: str, brought: _Brought) -> None:
        root = _root(fullname)
        whole = root == brought.name
        self._asks(root, whole)
        if whole:
            self._give_back(brought)
            return
        for name in [name for name, of in self._hidden.items() if of is brought and _root(name) == root]:
            self._show(name)
        _renew_loggers({name: state for name, state in brought.loggers.items() if _root(name) == root})

    def _give_back(self, brought: _Brought) -> None:
        for other in brought.needs:
            self._give_back(other)
        hidden = [name for name in brought.modules if name in self._hidden]
        for name in hidden:
            self._show(name)
        if not hidden:
            return
        _renew_loggers(brought.loggers)
        logging._handlerList.extend(brought.handlers)  # type: ignore[attr-defined]
        _forget(warnings.filters, brought.filters)
        warnings.filters[:0] = brought.filters  # type: ignore[index]
        _filters_changed()
        if not self._hidden and self in sys.meta_path:
            sys.meta_path.remove(self)
            logging.root.manager.loggerClass = None

    def _show(self, name: str) -> None:
        sys.modules[name] = self._hidden.pop(name).modules[name]

    def _make_logger(self, name: str) -> logging.Logger:
        """The logger that an import made is the one that the script gets, too: there must not be two of one name."""
        state = self._loggers.pop(name, None)
        return logging.getLoggerClass()(name) if state is None else state.make_new()


class _GivesBack(Loader):
    """Loads a module that was taken back; every other request is passed to the module's own loader."""

    def __init__(self, module: ModuleType, imported: Callable[[], None]) -> None:
        self._module, self._imported = module, imported
        self._spec, self._loader = module.__spec__, getattr(module, "__loader__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Gives it back, and what belongs to it; a hook that makes a module of its own gets that filled."""
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
    where[:] = [one for one in where if one not in what]


def _forget_loggers(states: dict[str, _LoggerState]) -> None:
    """Takes loggers, and the places that were held for their parents, out of the list of all loggers."""
    known = logging.root.manager.loggerDict
    for name, state in states.items():
        if known.get(name) is state.logger:
            del known[name]
    held = [name for name, one in known.items() if isinstance(one, logging.PlaceHolder)]
    others = known.keys() - set(held)
    for name in held:
        if not any(other.startswith(f"{name}.") for other in others):
            del known[name]


def _renew_loggers(states: dict[str, _LoggerState]) -> None:
    for name, state in states.items():
        if logging.getLogger(name) is state.logger:
            state.apply()
    logging.root.setLevel(logging.root.level)  # has each logger forget which levels it found to be enabled


def _filters_changed() -> None:
    """Has the interpreter, which remembers what it made of them, look at the filters of warnings again."""
    with warnings.catch_warnings():
        pass
