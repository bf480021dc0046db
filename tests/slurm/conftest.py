"""One cluster for all tests of this folder, and runs on it that are cancelled at the end of their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import running_slurm
from tests.slurm.run import RANK, Run


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """What leads Slurm's commands to the cluster."""
    with running_slurm() as environ:
        yield environ


@pytest.fixture
def submit(slurm: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Submits a script; `words` of rank 0, flags of the launcher."""
    runs: list[Run] = []

    def one(words: str, *flags: str, script: str = "train.sbatch", rank: Path = RANK, **more: Any) -> Run:
        command = [*flags, str(rank), str(tmp_path), *words.split()]
        runs.append(Run(tmp_path, slurm, script, command, **more))
        return runs[-1]

    yield one
    for run in runs:
        run.cancel()
