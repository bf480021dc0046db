"""Checks that the program of the ranks can be run, and makes the arguments that start it.

Does not use torch; the caller supplies the interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.wire.foreign import open_regular

_SOURCE = "the command line"


def check_script(script: str) -> None:
    """Checks that Python can read the script.

    Raises:
        ConfigError: it cannot.
    """
    if script == "-":
        return
    if not script or not Path(script).exists():
        hint = f"Check the path; it is looked for in {Path.cwd()}"
        raise ConfigError("script", script, _SOURCE, "there is no such file", hint)
    if not os.access(script, os.R_OK):
        raise ConfigError("script", script, _SOURCE, "this user cannot read it", f"chmod +r {script}")


def check_command(command: str) -> None:
    """Checks that the system can run a command (under `--no-python`).

    Raises:
        ConfigError: it cannot.
    """
    found = shutil.which(command)
    if found is None:
        if not Path(command).exists():
            hint = "Check the path or PATH"
            raise ConfigError("script", command, _SOURCE, "there is no such command", hint)
        if not os.access(command, os.X_OK):
            hint = f"chmod +x {command}, or leave out --no-python"
            raise ConfigError("script", command, _SOURCE, "has no execute permission", hint)
        hint = "Write it with a path (./...), or leave out --no-python"
        raise ConfigError("script", command, _SOURCE, "is not a command that can be run", hint)
    if _is_text_without_interpreter(Path(found)):
        hint = "Let its first line name an interpreter (#!/bin/bash), or leave out --no-python"
        raise ConfigError("script", command, _SOURCE, "does not name what runs it", hint)


def check_python(interpreter: str, source: str) -> None:
    """Checks that the interpreter the user named can be run.

    Raises:
        ConfigError: it cannot.
    """
    if shutil.which(interpreter) is None:
        raise ConfigError("interpreter", interpreter, source, "cannot be run", "Change or unset it")


def through_bootstrap(arguments: Sequence[str]) -> list[str]:
    """Returns `-u [-m] SCRIPT ...` with our bootstrap before the script; the bootstrap runs it as Python would."""
    after = list(arguments).index("-u") + 1
    return [*arguments[:after], bootstrap(), *arguments[after:]]


def bootstrap() -> str:
    """Returns the path of the bootstrap. With `-m`, a `types.py` in the current folder would replace Python's own."""
    client = importlib.util.find_spec("ft_client")
    assert client is not None and client.submodule_search_locations
    return str(Path(client.submodule_search_locations[0]) / "bootstrap.py")


def _is_text_without_interpreter(path: Path) -> bool:
    try:
        with open_regular(path, follow_link=True) as file:
            # The kernel reads as much (BINPRM_BUF_SIZE) to find out how to run a file.
            head = file.read(256)
    except OSError:
        return False
    return not head.startswith((b"#!", b"\x7fELF")) and b"\0" not in head
