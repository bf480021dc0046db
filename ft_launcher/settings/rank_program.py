"""Checks that the program of the ranks can be run, and makes the arguments that start it.

`job_settings.py` and `python_api.py` check; `node/ranks/` asks for the arguments when ranks start. This file does not
use torch, and the caller supplies the interpreter. Checks are made before anything starts: else the same error would
come from every rank of every node, after a rendezvous, and again at each restart.
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
    """Checks that Python can read the script. A script `-` is standard input, which nobody can check.

    Raises:
        ConfigError: it cannot be read.
    """
    if script == "-":
        return
    if not script or not Path(script).exists():
        hint = f"Check the path; it is looked for in {Path.cwd()}"
        raise ConfigError("script", script, _SOURCE, "there is no such file", hint)
    if not os.access(script, os.R_OK):
        raise ConfigError("script", script, _SOURCE, "this user cannot read it", f"chmod +r {script}")


def check_command(command: str) -> None:
    """Checks that the system can run a command, under `--no-python`.

    Raises:
        ConfigError: it cannot. The error says what to change: path, permission, or first line.
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
    """Checks that the interpreter that the user named can be run.

    Args:
        source: the variable that names it, for the error.

    Raises:
        ConfigError: it cannot be run.
    """
    if shutil.which(interpreter) is None:
        raise ConfigError("interpreter", interpreter, source, "cannot be run", "Change or unset it")


def through_bootstrap(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments `-u [-m] SCRIPT ...` with our bootstrap before the script.

    The bootstrap connects the rank to its monitor, and then runs the script as Python would.
    """
    after = list(arguments).index("-u") + 1
    return [*arguments[:after], bootstrap(), *arguments[after:]]


def bootstrap() -> str:
    """Returns the path of the bootstrap.

    It is started by its path. With `-m`, a `types.py` in the current folder would take the place of Python's own
    module.
    """
    client = importlib.util.find_spec("ft_client")
    assert client is not None and client.submodule_search_locations
    return str(Path(client.submodule_search_locations[0]) / "bootstrap.py")


def _is_text_without_interpreter(path: Path) -> bool:
    """Returns whether a file is text whose first line names no interpreter: the kernel cannot run such a file."""
    try:
        with open_regular(path, follow_link=True) as file:
            # The kernel reads as much (BINPRM_BUF_SIZE) to find out how to run a file.
            head = file.read(256)
    except OSError:
        return False
    return not head.startswith((b"#!", b"\x7fELF")) and b"\0" not in head
