"""Puts this launcher in the place of torch's where programs call that: set FT_AS_TORCHRUN=1. Here is the hook itself.

`client/ft_as_torchrun.pth` calls `install_if_asked` at the start of each interpreter in whose environment the variable
is. That puts a finder in front of Python's own. The finder knows three modules of torch, and leaves all others alone.
Once one of the three is loaded, `in_torchs_place.py` puts our functions in it, and says what becomes of each.

Every interpreter with the variable runs this file, mostly for nothing. So it imports nothing but what an interpreter
has at its start (no `typing`, no `importlib.abc`): all of it takes less than a millisecond.

Threads: the importing one, which holds Python's lock for that module.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

RUN, LAUNCH, API = "torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher.api"
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")
_PROGRAM = "from ft_launcher.in_torchs_place import program; program()"


def install_if_asked(variable: str) -> None:
    """Puts the hook in place if a variable is true. Called as the interpreter starts.

    Args:
        variable: `env.AS_TORCHRUN`.
    """
    text = os.environ.get(variable, "").strip().lower()
    if text in _TRUE:
        if not any(isinstance(finder, Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, Finder())
    elif text not in _FALSE:
        say(f"{variable}={text} is neither true nor false: torch's own launcher is used")


def remove() -> None:
    """Takes the hook away, as the launcher does for itself: it uses torch's modules as they are."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def say(text: str) -> None:
    """Prints a line to stderr, as far as there is one."""
    try:
        print(f"ft_launcher: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # stderr is closed
        return


class Finder:
    """A finder of `sys.meta_path` that has three modules of torch changed once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns Python's own specification of such a module, with a loader of ours; None for all other modules."""
        if fullname not in (RUN, LAUNCH, API):
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader)  # type: ignore[assignment]
        return spec


class _ChangingLoader:
    """Python's own loader of a module of torch, and what is changed in the module. `own`: that loader."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Makes the module as Python does."""
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Loads the module, and puts our functions in it."""
        self._own.exec_module(module)
        from ft_launcher import in_torchs_place

        in_torchs_place.change(module)

    def get_code(self, name: str) -> CodeType | None:
        """Returns the code that `python -m NAME` runs: ours for torch's two commands."""
        if name in (RUN, LAUNCH):
            return compile(_PROGRAM, "<ft_launcher>", "exec")
        code: CodeType | None = self._own.get_code(name)
        return code

    def __getattr__(self, name: str) -> Any:
        """Everything else is as of Python's own loader, as for who reads the source."""
        return getattr(self._own, name)
