"""How all tests run: hypothesis without a limit on time, SIGINT as in a shell's foreground, records of launchers in the
tests' own folder, and which tests one worker of pytest-xdist runs together.

pytest-xdist's own mark for that, `xdist_group`, does nothing with pytest 9.2.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script starts by `&`, and all that starts from it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.load_profile("ci")  # the same examples each time, however long one takes on a busy machine

TOGETHER = (
    "tests/client/test_group.py::",
    "tests/client/test_preemption.py::",
    "tests/client/integrations/test_lightning_alone.py::",
    "tests/client/inprocess/test_abort.py::test_one_of_two_is_freed",
    "tests/client/inprocess/test_abort.py::test_three_of_four_are_freed",
    "tests/client/rerun/",
    "tests/slurm/",
    *(f"tests/e2e/test_fidelity.py::test_nothing_tells_how_it_was_started[part {number} " for number in range(4)),
)
"""Beginnings of tests that share something dear."""


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Launchers without `--log-dir` keep their records here, and TMPDIR stays empty where a test checks that."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each worker one test after the other, but `TOGETHER` as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((beginning for beginning in TOGETHER if nodeid.startswith(beginning)), nodeid)

    return Scheduling(config, log)
