"""Starts a script as the launcher starts a rank: by the bootstrap, with a monitor's socket in its environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rank_monitor.contract import env
from tests.client.fake_monitor import DEADLINE_S


@contextlib.contextmanager
def started(script: str, folder: Path, socket: Path, *how: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
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
    process = subprocess.Popen(
        [sys.executable, *(how or ("-u", "-m", "ft_client.bootstrap")), str(path)],
        cwd=folder,
        env={**os.environ, **rank, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], words: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a rank that comes to its end when it has read `words`."""
    out, err = process.communicate(words, timeout=DEADLINE_S)
    return process.returncode, out, err
