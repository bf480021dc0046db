"""Calls a function once a module has been imported, without importing it: at once if the module is loaded already.

`bootstrap.py` has two things done in this way before the script, where the environment of this rank asks for them:

1. The default timeout of process groups is set (`set_collective_timeout`): torch's names get the value once their
   module has run, or is given to a fork. A group that is made with a timeout of its own keeps that.
2. torch's worker server is started (`answer_monitor`), which answers this rank's monitor when it asks for the flight
   recorder: a rank may hang then. The server is a thread in C++, so it answers also while the main thread holds the
   GIL. The server is started once the script has imported torch.distributed, on a socket in the run's private folder,
   and never on a port.

Nothing here may keep the script from running, and torch must not be imported for it: a script without torch stays one.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rank_monitor.contract import env

_CONSTANTS = "torch.distributed.constants"
_C10D = "torch.distributed.distributed_c10d"
"""This module imports the names of the timeouts from the one above, and so has variables of its own."""
_NAMES = ("default_pg_timeout", "default_pg_nccl_timeout")
"""The first is for groups that are made without naming a backend, the second for those of NCCL."""
_IN_C = "torch._C._distributed_c10d"
_ERROR = 2
"""c10's level of log lines: 0 info, 1 warning, 2 error. The server says at level 1 that it listens."""


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with the module: now if the module is loaded, otherwise right after its code has run.

    What `action` raises is raised into the import of the script.
    """
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Later(name, action))


def act_on_loaded() -> None:
    """Calls the actions for modules that were put into `sys.modules` without an import: so a fork gets the modules that
    its zygote has imported."""
    for waiting in [finder for finder in sys.meta_path if isinstance(finder, _Later)]:
        waiting.act_if_loaded()


class _Later(MetaPathFinder):
    """A finder that waits for one module. The usual finders and the usual loader load it; then the action is called.

    It finds the module once, and removes itself from `sys.meta_path`.
    """

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def act_if_loaded(self) -> None:
        """Calls the action and removes the finder if the module is loaded."""
        if self._name in sys.modules:
            sys.meta_path.remove(self)
            self._action(sys.modules[self._name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, action = spec.loader, self._action

        def exec_module(module: ModuleType) -> None:
            # The loader's own method is in its class; the attribute of the instance, this function, hides it.
            del loader.exec_module
            loader.exec_module(module)
            action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def set_collective_timeout() -> None:
    """Sets torch's default timeouts to what the environment of this rank asks for, if anything.

    An invalid value is reported on stderr.
    """
    timeout = _asked_timeout()
    if timeout is not None:
        after_import(_CONSTANTS, lambda module: _replace_defaults(timeout))


def _asked_timeout() -> datetime.timedelta | None:
    """Returns the timeout that the environment asks for; None: none, or an invalid one."""
    text = os.environ.get(env.NCCL_COLLECTIVE_TIMEOUT)
    if text is None:
        return None
    from rank_monitor.contract.settings import kinds

    try:
        seconds = kinds.LIMIT.read(text)
        if seconds is None:
            return None
        return datetime.timedelta(seconds=float(str(seconds)))
    except (ValueError, OverflowError) as problem:
        print(f"ft_client: {env.NCCL_COLLECTIVE_TIMEOUT}={text!r} does nothing: {problem}", file=sys.stderr)
        return None


def _replace_defaults(timeout: datetime.timedelta) -> None:
    for module in (_CONSTANTS, _C10D):
        if module in sys.modules:
            for name in _NAMES:
                setattr(sys.modules[module], name, timeout)


def answer_monitor() -> None:
    """Has torch's worker server started once torch.distributed is imported, if the launcher named a socket."""
    path = os.environ.get(env.FLIGHT_RECORDER_SOCKET)
    if path:
        after_import(_C10D, lambda module: _serve(path))


def _serve(path: str) -> None:
    """Starts the server at `path`. Does nothing where this torch has none, or where it cannot be started unseen."""
    kind = getattr(sys.modules.get(_IN_C), "_WorkerServer", None)
    if kind is None:  # a torch without it
        return
    # A rank of an earlier cycle had the same path.
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108  (pathlib costs each rank 4 ms at its start)
    with (
        contextlib.suppress(Exception),
        _without_warnings(sys.modules["torch"]),
    ):
        server = kind(path)
        # Never freed: its destructor would write a line at each exit of a rank.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


@contextlib.contextmanager
def _without_warnings(torch: ModuleType) -> Iterator[None]:
    """A context in which c10 logs errors only: the server would print a line at its start.

    Raises:
        OSError, ValueError: this torch has no such level. Then nothing may be started, since the line would be seen.
    """
    folder = os.path.dirname(str(torch.__file__))  # noqa: PTH120
    level: Any = ctypes.c_int.in_dll(ctypes.CDLL(f"{folder}/lib/libc10.so"), "FLAGS_caffe2_log_level")
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before
