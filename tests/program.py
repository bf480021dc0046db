"""Starts programs for tests, and waits for them under a deadline that `patience.py` scales."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[1]
ONE_TRY = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Without a resolver each new store waits 5 s for the name of its peer; one try of 1 s is enough."""
_FOREIGN = ("FAULT_TOL_", "FT_", "PET_", "PYTHON", "RES_OPTIONS", "TORCHELASTIC_")


def clean_environment(*foreign: str, **variables: str) -> dict[str, str]:
    """The environment of a user's shell: without what the launcher, torchrun and the tests set in this process.

    Programs find this tree by it, where they import the packages by their names.

    Args:
        foreign: beginnings of more names to leave out.
        variables: of the program's environment.
    """
    left_out = (*_FOREIGN, *foreign)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return inherited | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"} | variables


def run(
    words: Sequence[str | Path],
    *,
    folder: Path | None = None,
    limit_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        folder: its current folder.
        limit_s: its deadline on a calm machine.
        environ: its environment; this process' own when not given.
        check: whether it must end with exit code 0.
        more: for `subprocess.run`; without `stdin` or `input` its standard input is empty.
    """
    if "input" not in more:
        more.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(
        words,
        cwd=folder,
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=patient(limit_s),
        **more,
    )
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def python(code: str, *argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python code, which must end well.

    Args:
        argv: the code's arguments.
        more: for `run`.
    """
    return run([sys.executable, "-c", code, *argv], check=True, **more)


def output_of(words: Sequence[str], folder: Path, limit_s: float = 120, **variables: str) -> str:
    """What a program prints that ends well and was started from a user's shell.

    Args:
        folder: its current folder.
        variables: of its environment.
    """
    environ = clean_environment(**{"OMP_NUM_THREADS": "1", **variables})
    return run(words, folder=folder, limit_s=limit_s, environ=environ, check=True).stdout


@contextlib.contextmanager
def started(words: Sequence[str | Path], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that runs beside the test; it is killed at the end if it still lives.

    Args:
        more: for `subprocess.Popen`; the standard streams are pipes of text unless given.
    """
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(words, text=True, **(streams | more))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def suspend(pids: Sequence[int], seconds: float) -> None:
    """Stops processes for so long, one after the other, and continues them: the length of the pause is the fault."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def ended(process: subprocess.Popen[str], text: str = "", limit_s: float = 60.0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program that ends when it has read `text`."""
    out, err = process.communicate(text, timeout=patient(limit_s))
    return process.returncode, out, err
