"""A clean environment and a folder with a script, for tests that read command lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed.run import get_args_parser

from ft_launcher import cli
from ft_launcher.settings import prescan
from ft_launcher.settings.job_settings import Job

OF_LATER_TORCH = {
    "--duplicate-stdout-filters",
    "--event-log-handler",
    "--log-line-prefix-template",
    "--numa-binding",
    "--print-completion",
    "--run-path",
    "--shutdown-timeout",
    "--signals-to-handle",
    "--virtual-local-rank",
}
"""Options that some of the releases of torch that we support do not have."""


def needs(*words: str) -> None:
    """Skips a test whose command line has an option that the installed torch does not have."""
    lacking = (OF_LATER_TORCH & {word.partition("=")[0] for word in words}) - set(
        get_args_parser()._option_string_actions
    )
    if lacking:
        pytest.skip(f"this torch has no {', '.join(sorted(lacking))}")


class NoZygotes:
    """Stands in for a `ZygotePool`: the process of the tests must not fork itself into ranks."""

    def prepare(self, *args: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def main(words: Sequence[str]) -> NoReturn:
    """`cli.main` in the process of the tests."""
    zygotes: Any = NoZygotes()
    cli.main(words, prescan.prepare_threads(prescan.scan(words, os.environ), os.environ), zygotes)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with `train.py` in it; no variable of torch's launcher or ours is set."""
    for name in list(os.environ):
        if name.startswith(("FT_", "FAULT_TOL_", "PET_", "TORCH_ELASTIC_", "PYTHON_EXEC", "OMP_NUM")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # remembered, so that what the code sets is undone
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    return tmp_path


@pytest.fixture
def job_of(folder: Path) -> Callable[..., Job]:
    """Words of a command line -> its job."""

    def make(*words: str) -> Job:
        needs(*words)
        seen = prescan.prepare_threads(prescan.scan(words, os.environ), os.environ)
        return cli.make_job(words, seen, os.environ)

    return make
