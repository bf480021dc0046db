"""Runs a program that uses this tree as a user would start it: without the tests' own settings in its environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.patience import patient

ROOT = Path(__file__).resolve().parents[1]
_FOREIGN = ("FT_", "PET_", "PYTHON", "RES_OPTIONS", "TORCHELASTIC_")


def output_of(words: list[str], folder: Path, limit_s: float = 120, **variables: str) -> str:
    """What a program prints that ends well.

    Args:
        folder: its current folder.
        variables: of its environment.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environ |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        words,
        cwd=folder,
        env=environ,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(limit_s),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
