"""Records, while modules are imported, which module's code imported which others, and what else each module did.

A rank must get, with a module that its script imports, the modules that this import would have loaded, and no others.
So it must be known what each single module needs. Used by `first_import.py` in the zygote, and in the zygote's child
that tries modules; never in a rank.

How it is seen:
- Import statements: by a wrapper around `builtins.__import__`. Calls of `importlib.import_module`: by a wrapper around
  the function behind it. Both also when the module is loaded already.
- Whose code runs: by a finder in front of all others, which wraps the `exec_module` of each loader. A stack of `Part`s
  has the modules whose code runs now; what is done is charged to the top one (`_charge`), before and after each module.

An example: module `a` begins, sets a variable, imports `b`, which adds a logger, and sets another variable.

    stack      what runs                  charged by `_charge`
    a          code of `a`                the first variable, to `a`, when `b` begins
    a, b       code of `b`                the logger, to `b`, when `b` ends; `a` needs `b`
    a          the rest of `a`            the second variable, to `a`, when `a` ends

All of this is undone when the recording ends. Modules of Python itself are not recorded: what their code does counts as
done by the module that imported them.

The recording is for one thread: imports by other threads would be charged to whatever module runs at that moment. An
import that starts a thread is left out by `import_effects.py`.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ft_launcher.node.zygote.exchanged_names import ExchangedName, Place, WatchedNames
from ft_launcher.node.zygote.logger_state import LoggerState

_bootstrap: Any = importlib._bootstrap
"""Has `_gcd_import`, which `importlib.import_module` calls."""
Observe = Callable[[], Sequence[str]]
"""A function that returns, in words, what was done to this process since its last call, beside what is recorded
here."""


def root(name: str) -> str:
    """Returns the name of the top-level package of a module."""
    return name.partition(".")[0]


def parents(name: str) -> set[str]:
    """Returns the names of the packages that a module is in."""
    words = name.split(".")
    return {".".join(words[:length]) for length in range(1, len(words))}


class EnvironmentReads(type(os.environ)):  # type: ignore[misc]
    """`os.environ` that records which variables are read; a variable that is only passed in a loop is not recorded.

    A copy of the environment reads each variable once after `__iter__` has named it, and nothing follows from the
    values. Else every module that starts a process, or copies the environment, would depend on all variables.
    """

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


def watch_reads() -> type:
    """Has `os.environ` record what is read, until `end_reads`; returns its class of before.

    The object stays the same: modules keep references to `os.environ`.
    """
    usual = os.environ.__class__
    os.environ.__class__ = EnvironmentReads
    return usual


def drain_reads() -> set[str]:
    """Returns the variables that were read since the last call."""
    read: set[str] = vars(os.environ).pop("_read", set())
    return read


def end_reads(usual: type) -> set[str]:
    """Ends `watch_reads`; returns the variables that were read since the last call of `drain_reads`."""
    os.environ.__class__ = usual
    vars(os.environ).pop("_passing", None)
    return drain_reads()


@dataclass(frozen=True)
class Variable:
    """A change of a variable of the environment, by the code of a module. A value of None: the variable is not
    there."""

    name: str
    before: str | None
    after: str | None

    def apply(self) -> None:
        """Makes the change in this process."""
        _set(self.name, self.after)

    def undo(self) -> None:
        """Undoes the change in this process."""
        _set(self.name, self.before)


@dataclass
class Part:
    """What one module's own code did when it was imported.

    Attributes:
        name: of the module.
        module: what is in `sys.modules` under the name, once the recording has ended. It need not be a module.
        needs: the modules that it imported, loaded before or not, and their parent packages.
        reads: variables of the environment that it read.
        loggers: those that it made, by name, as they were at the end of the recording.
        handlers: of log lines, that it made.
        filters: of warnings, that it added.
        exits: exit functions that it registered: they are registered when a script imports the module.
        environ: variables that it set or removed.
        exchanges: names of other modules that it gave other values: the script finds these when it imports the module.
        effects: what else it did to the process, in words.
        parent: the package that has it as an attribute; None: none has.
    """

    name: str
    module: Any = None
    needs: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    loggers: dict[str, LoggerState] = field(default_factory=dict)
    handlers: list[Any] = field(default_factory=list)
    filters: list[Any] = field(default_factory=list)
    exits: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    environ: list[Variable] = field(default_factory=list)
    exchanges: list[ExchangedName] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    parent: ModuleType | None = None

    def absorb(self, other: Part) -> None:
        """Adds what the code of another module did, whose import failed. The other module does not exist, but what it
        did stays done."""
        self.needs |= other.needs
        self.reads |= other.reads
        self.handlers += other.handlers
        self.filters += other.filters
        self.exits += other.exits
        self.environ += other.environ
        self.exchanges += other.exchanges
        self.effects += other.effects


class ImportRecorder(MetaPathFinder):
    """A recording, as a context. `Imports.recording` opens one, and the result is `parts`.

    Args:
        hidden: called with a module's name; returns whether ranks find the module only when they import it.
        observe: called before and after each module's code; see `Observe`.
        watched: names that modules may exchange, which are looked at after each module's code.

    Attributes:
        parts: name -> what the import did, of the modules that were imported in the context. In the order of
            `sys.modules` once the context has ended.
    """

    def __init__(
        self,
        hidden: Callable[[str], bool],
        observe: Observe = tuple,
        watched: Sequence[Place] = (),
    ) -> None:
        self.parts: dict[str, Part] = {}
        self._hidden, self._observe = hidden, observe
        self._watched = WatchedNames(watched)
        self.unassigned: list[ExchangedName] = []
        """Exchanges of which it is not known which module made them. A script finds them with each of the modules."""
        self.outside = Part("")
        """What was done while no module's code ran, for example by a loader."""
        self._running = [self.outside]
        self._made: dict[str, Part] = {}
        self._active = False
        self._searching: set[str] = set()

    def __enter__(self) -> ImportRecorder:
        self._seen = set(sys.modules)
        self._loggers = _logger_names()
        self._handlers = list(logging._handlerList)  # type: ignore[attr-defined]
        self._filters = list(warnings.filters)
        self._environ = dict(os.environb)
        self._import, self._gcd_import, self._register = builtins.__import__, _bootstrap._gcd_import, atexit.register
        self._usual_environ = watch_reads()
        builtins.__import__ = self._import_statement
        _bootstrap._gcd_import = self._import_module
        atexit.register = self._register_exit  # type: ignore[assignment]
        sys.meta_path.insert(0, self)
        self._observe()
        self._active = True
        return self

    def drain_outside(self) -> list[str]:
        """Returns, in words, what was done to the process since the last call while no module's code ran.

        Called by the trial between two imports: nobody knows which module a script would have to import to see this, so
        the module whose import has just ended is left out.
        """
        self._charge()
        effects = [*self.outside.effects, *(f"exchanges {exchange.place}" for exchange in self.outside.exchanges)]
        self.outside.effects, self.outside.exchanges = [], []
        return effects

    def __exit__(self, *failure: object) -> None:
        self._charge()
        self._active = False
        sys.meta_path.remove(self)
        builtins.__import__, _bootstrap._gcd_import, atexit.register = self._import, self._gcd_import, self._register
        end_reads(self._usual_environ)
        self.parts = {name: self.parts[name] for name in sys.modules if name in self.parts}
        for name, part in self.parts.items():
            part.module = sys.modules[name]
            part.exchanges += self.unassigned
            before, _, own = name.rpartition(".")
            parent = sys.modules.get(before)
            if isinstance(parent, ModuleType) and vars(parent).get(own) is part.module:
                part.parent = parent
        known = logging.root.manager.loggerDict
        # The state of loggers is taken at the end: a logger may have been configured after it was made.
        for title, part in self._made.items():
            found = known.get(title)
            if isinstance(found, logging.Logger):
                part.loggers[title] = LoggerState.of(found)

    # Whose code runs.

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds what the usual finders find. For a module that will be hidden, wraps the method that runs its code.

        The import system calls it for each module that is not loaded. The search calls this finder again, which then
        stands aside (`_searching`).
        """
        if not self._active or not self._hidden(fullname) or fullname in self._searching:
            return None
        self._note(fullname)
        self._searching.add(fullname)
        try:
            spec = importlib.util._find_spec(fullname, path, target)  # type: ignore[attr-defined]
        finally:
            self._searching.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._wrap(fullname, spec.loader)
        return spec  # type: ignore[no-any-return]

    def _wrap(self, name: str, loader: Any) -> None:
        """Has a loader's `exec_module` push and pop the module on the stack of those whose code runs."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The loader's own method is in its class; the attribute of the instance hid it.
            vars(loader).pop("exec_module", None)
            self._charge(name)
            part = self.parts.setdefault(name, Part(name))
            self._running.append(part)
            try:
                run(module)
            except BaseException:
                self._charge()
                self._running.pop()
                # The module will not be there, but what it has imported will. That counts for the module that tried to
                # import it.
                self._running[-1].absorb(self.parts.pop(name, part))
                raise
            self._charge()
            self._running.pop()

        try:
            loader.exec_module = exec_module
        except AttributeError:
            # The loader takes no attributes. What the module does then counts for the module that imports it.
            return

    def _charge(self, started: str = "") -> None:
        """Charges all that was done since the last call to the module whose code runs: the top of the stack.

        Args:
            started: the module whose code is about to run; empty: none.
        """
        part = self._running[-1]
        self._charge_strays(started)
        part.effects += self._observe()
        part.effects += self._own_exchanged()
        part.exchanges += self._watched.exchanges()
        part.reads |= drain_reads()
        loggers = _logger_names()
        self._made |= dict.fromkeys(loggers - self._loggers, part)
        self._loggers |= loggers
        handlers, filters = list(logging._handlerList), list(warnings.filters)  # type: ignore[attr-defined]
        part.handlers += [found for found in handlers if found not in self._handlers]
        part.filters += [rule for rule in filters if rule not in self._filters]
        self._handlers, self._filters = handlers, filters
        environ = dict(os.environb)
        for name in environ.keys() | self._environ.keys():
            before, after = self._environ.get(name), environ.get(name)
            if before != after:
                part.environ.append(Variable(os.fsdecode(name), _decoded(before), _decoded(after)))
        self._environ = environ

    def _charge_strays(self, started: str) -> None:
        """Records modules that code put into `sys.modules` itself since the last call: the module that runs needs them.

        Args:
            started: the module whose code is about to run, which the import system has put there.
        """
        # New modules are last: an import that ends puts its module last again.
        for name in reversed(list(sys.modules)):
            if name in self._seen:
                break
            self._seen.add(name)
            if name != started and name not in self.parts and self._hidden(name):
                self.parts[name] = Part(name, needs=parents(name))
                self._running[-1].needs.add(name)

    def _own_exchanged(self) -> list[str]:
        """Returns, in words, which of the recording's own wrappers a module has replaced; puts the wrappers back.

        The module's value is lost when the recording ends, so the module has to be left out.
        """
        own = (
            (builtins, "__import__", self._import_statement, "builtins.__import__"),
            (_bootstrap, "_gcd_import", self._import_module, "importlib.import_module"),
            (atexit, "register", self._register_exit, "atexit.register"),
        )
        found = []
        for module, name, value, words in own:
            if getattr(module, name) != value:
                setattr(module, name, value)
                found.append(f"changes {words}")
        return found

    # What it imports.

    def _import_statement(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Stands in for `builtins.__import__`, and notes what was imported, loaded before or not."""
        found = self._import(name, globals, locals, fromlist or (), level)
        if self._active:
            whole = _absolute(name, globals or {}, level)
            self._note(whole)
            for entry in _names(fromlist or (), sys.modules.get(whole)):
                if f"{whole}.{entry}" in sys.modules:
                    self._note(f"{whole}.{entry}")
        return found

    def _import_module(self, name: str, package: str | None = None, level: int = 0) -> ModuleType:
        """Stands in for the function behind `importlib.import_module`, and notes what was imported."""
        found: ModuleType = self._gcd_import(name, package, level)
        if self._active:
            self._note(_absolute(name, {"__package__": package}, level))
        return found

    def _note(self, name: str) -> None:
        """Notes that the module whose code runs needs this module and its parent packages."""
        self._running[-1].needs |= parents(name) | {name}

    def _register_exit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Stands in for `atexit.register` during the recording, and after it for modules that kept the name.

        A function of a recorded module is not registered, but noted: it is registered when a script imports the module.
        """
        of_python = root(getattr(function, "__module__", None) or "") in sys.stdlib_module_names
        if of_python or not self._active:
            return self._register(function, *args, **kwargs)
        self._running[-1].exits.append((function, args, kwargs))
        return function


def _set(name: str, value: str | None) -> None:
    """Sets a variable of this process, or removes it where the value is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _decoded(value: bytes | None) -> str | None:
    """Returns the value of a variable as text; None stays None."""
    if value is None:
        return None
    return os.fsdecode(value)


def _logger_names() -> set[str]:
    """Returns the names of all loggers. Placeholders, which `logging` makes of parents' names, are none."""
    known = logging.root.manager.loggerDict
    return {name for name, found in known.items() if isinstance(found, logging.Logger)}


def _absolute(name: str, names: Mapping[str, Any], level: int) -> str:
    """Returns the absolute name of what a statement in a module with these global names imports."""
    if level == 0:
        return name
    package = names.get("__package__")
    if not package:
        package = names.get("__name__", "")
        if "__path__" not in names:
            package = package.rpartition(".")[0]
    base = package.rsplit(".", level - 1)[0]
    return f"{base}.{name}".removesuffix(".")


def _names(fromlist: Sequence[str], module: Any) -> Sequence[str]:
    """Returns the names that `from module import ...` takes; for `*` those of the module's `__all__`."""
    if "*" in fromlist:
        return [entry for entry in getattr(module, "__all__", ()) if isinstance(entry, str)]
    return fromlist
