"""Starts a script as the launcher starts a rank: by the bootstrap, with a monitor's socket in its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from rank_monitor.contract import env
from tests import program


def started(
    script: str, folder: Path, socket: Path, *how: str, **variables: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A running rank; it is killed at the end if it still lives.

    Args:
        how: words between `python` and the script; none: the bootstrap.
        variables: environment besides what a rank has anyway.
    """
    path = folder / "script.py"
    path.write_text(script)
    rank = {
        env.RANK_MONITOR_SOCKET: str(socket),
        env.STACK_FILE: str(folder / "stacks.txt"),
        env.STACK_SIGNAL: "41",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
    words = [sys.executable, *(how or ("-u", "-m", "ft_client.bootstrap")), path]
    return program.started(words, cwd=folder, env={**os.environ, **rank, **variables})
