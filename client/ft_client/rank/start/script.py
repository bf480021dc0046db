"""Runs the user's script in this process as `python` would: same names, same paths, same messages at its end.

`bootstrap.py` calls it. What an interpreter does for `python SCRIPT` and `python -m MODULE` is written in C;
`_run_module_as_main` of runpy is the part of that in Python, for modules, folders and zip files. Knows nothing of
monitoring.

**What must be as under `python`**: `sys.argv`, `sys.orig_argv` and `sys.path`; the names in `__main__`; the modules
that are loaded; the traceback of an exception; and the frames on the stack, each of which counts towards the recursion
limit.

**Our own modules.** A rank has loaded packages of ours before its script begins. The script may have a file
`rank_monitor.py` beside it, or in a folder that it puts first into `sys.path`. So our modules are removed from
`sys.modules` (`release_own_names`), and `sys.path` decides what the first import of such a name gets, as in a fresh
interpreter: our modules, which are loaded already, or what is found there. Modules of the standard library that we have
loaded are treated alike (`_uncover`).
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Container, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType, TracebackType
from typing import Protocol

_AT_STARTUP = frozenset({"abc", "codecs", "encodings", "genericpath", "io", "os", "posixpath", "site", "stat"})
"""Modules of the standard library that every interpreter has loaded before a script's folder is looked at."""
_OWN_PACKAGES = ("ft_client", "rank_monitor")


class Script:
    """The script to be run.

    Args:
        arguments: `[-m] SCRIPT ARGS`, as after `python`.
        first_path: what the interpreter put first into `sys.path` for `-m`; None in safe-path mode, where it adds none.
    """

    def __init__(self, arguments: list[str], first_path: str | None) -> None:
        self._arguments = arguments
        self._is_module = arguments[0] == "-m"
        if self._is_module:
            _, self._name, *self._script_arguments = arguments
        else:
            self._name, *self._script_arguments = arguments
        self._first_path = first_path

    def load_program(self) -> Callable[[], object]:
        """Makes this process what it is when an interpreter begins the script. Returns the callable that runs the
        script.

        Exits with 2 and Python's own message where the file cannot be read.
        """
        forget_bootstrap()
        sys.orig_argv[:] = without_bootstrap(sys.orig_argv, self._arguments)
        if self._is_module:
            # runpy replaces the first entry by the path of the module, once the module is found.
            sys.argv = ["-m", *self._script_arguments]
            self._look_first_in(self._first_path)
            return partial(runpy._run_module_as_main, self._name)  # type: ignore[attr-defined]
        sys.argv = [self._name, *self._script_arguments]
        if get_importer(self._name) is not None:  # a folder or zip file with a __main__
            self._look_first_in(_absolute(self._name), always=True)
            return partial(runpy._run_module_as_main, "__main__", alter_argv=False)  # type: ignore[attr-defined]
        self._look_first_in(str(Path(self._name).resolve().parent))
        return self._file()

    def below(self, trace: TracebackType | None) -> TracebackType | None:
        """Returns the part of a traceback that `python` would have shown: what is below our frames."""
        return below(trace, _OUR_FRAMES)

    def _look_first_in(self, folder: str | None, always: bool = False) -> None:
        """Puts a folder first into `sys.path`; in safe-path mode only where `always` is set, as the interpreter
        does."""
        if folder is not None and (always or self._first_path is not None):
            sys.path.insert(0, folder)
            _uncover(folder)

    def _file(self) -> Callable[[], object]:
        """Compiles the script, or loads its bytecode. Returns what executes it in `__main__`."""
        path = _absolute(self._name)
        compiled = path.endswith(".pyc")
        loader: SourcelessFileLoader | SourceFileLoader
        if compiled:
            loader = SourcelessFileLoader("__main__", path)
        else:
            loader = SourceFileLoader("__main__", path)
        try:
            source = loader.get_data(path)
        except OSError as error:
            print(
                f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr
            )
            sys.exit(2)  # as `python` does
        names = sys.modules["__main__"].__dict__
        names.update(__file__=path, __cached__=None, __loader__=loader)
        if compiled:
            code = loader.get_code("__main__")
        else:
            code = compile(source, path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return partial(exec, code, names)


_OUR_FRAMES = frozenset({Script.load_program.__code__, Script._file.__code__})


def below(trace: TracebackType | None, codes: Container[CodeType]) -> TracebackType | None:
    """Returns the part of a traceback below the last frame that runs one of `codes`; all of it where there is none."""
    found = trace
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            found = trace.tb_next
        trace = trace.tb_next
    return found


class Main(Protocol):
    """The main program of this process: a `Script`, or a `function.Function`."""

    def load_program(self) -> Callable[[], object]:
        """Makes this process ready, and returns the callable that runs the program. What that raises is not handled."""

    def below(self, trace: TracebackType | None) -> TracebackType | None:
        """Returns the part of a traceback without our frames."""


def hide_frames(theirs: TracebackType | None) -> None:
    """Has the interpreter show `theirs` as the traceback of the exception that is about to end this process.

    `sys.excepthook` is replaced once for that. The hook in force, which may be the script's own, is then called with
    the same arguments as under `python`.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = show
        sys.last_traceback = theirs
        error.__traceback__ = theirs
        show(kind, error, theirs)

    sys.excepthook = hook


def without_bootstrap(argv: list[str], arguments: list[str]) -> list[str]:
    """Returns `sys.orig_argv` as if the interpreter had been given `arguments` itself, and not our module before
    them."""
    head = argv[: len(argv) - len(arguments)]
    if head[-2:-1] == ["-m"]:
        return head[:-2] + arguments
    return head[:-1] + arguments


def forget_bootstrap() -> None:
    """Makes the module `__main__`, which was ours, what it is at the start of an interpreter."""
    main = sys.modules["__main__"].__dict__
    nothing = dict.fromkeys(("__doc__", "__package__", "__loader__", "__spec__"))
    fresh: dict[str, object] = {"__name__": "__main__", **nothing}
    if "__annotations__" in main:
        fresh["__annotations__"] = {}
    fresh["__builtins__"] = sys.modules["builtins"]
    main.clear()
    main.update(fresh)


def _absolute(name: str) -> str:
    """Returns the path joined to the current folder, not normalised, as the interpreter does it."""
    if name.startswith("/"):
        return name
    return f"{Path.cwd()}/{name}"


def _uncover(folder: str) -> None:
    """Removes modules of the standard library from `sys.modules` that a file in the script's folder hides by its name.

    Under `python` they would not have been loaded yet; here our own code may have loaded them.
    """
    try:
        with os.scandir(folder) as entries:
            found = {entry.name.removesuffix(".py") for entry in entries}
    except OSError:
        return
    for name in found:
        if name in sys.stdlib_module_names and name not in _AT_STARTUP | set(sys.builtin_module_names):
            sys.modules.pop(name, None)


def release_own_names() -> None:
    """Removes our modules from `sys.modules`. A finder puts those of a package back when that package is imported."""
    packages: dict[str, dict[str, ModuleType]] = {}
    for name in list(sys.modules):
        package = name.partition(".")[0]
        if package in _OWN_PACKAGES:
            packages.setdefault(package, {})[name] = sys.modules.pop(name)
    if packages:
        sys.meta_path.insert(0, _OwnNames(packages))


class _OwnNames(MetaPathFinder):
    """Finds each of our packages once, and removes itself after the last. Modules that are never imported again work
    all the same: our own code has references to them."""

    def __init__(self, packages: dict[str, dict[str, ModuleType]]) -> None:
        self._packages = packages
        self._hidden: list[dict[str, ModuleType]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        modules = self._packages.pop(fullname, None)
        if modules is None:
            return None
        if not self._packages and self in sys.meta_path:
            sys.meta_path.remove(self)
        package = modules[fullname]
        found = importlib.util.find_spec(fullname)
        if found is not None and not _is_file_of(package, found.origin):
            self._hidden.append(modules)
            return found
        sys.modules.update(modules)
        return ModuleSpec(fullname, _Loaded(package), origin=package.__file__, is_package=True)


class _Loaded(Loader):
    """A loader for a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module itself, which exists already."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restores `__spec__`, which the import system has replaced; the module's code is not run again."""
        self._module.__spec__ = self._spec


def _is_file_of(module: ModuleType, origin: str | None) -> bool:
    """Whether the file that an import has found is that of a module of ours."""
    if origin is None or module.__file__ is None:
        return False
    try:
        return os.path.samefile(origin, module.__file__)  # noqa: PTH121 (text in, text out)
    except OSError:
        return origin == module.__file__
