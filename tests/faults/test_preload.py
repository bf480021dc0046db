"""A signal to the launcher while it imports a module of the user's that takes long: it ends, and nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Place
from tests.faults.training import Plan
from tests.program import ROOT

MODULE = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(300)\n"
ENDS_S = 20.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_module_is_preloaded(
    start_job: StartJob, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "takes_long.py").write_text(MODULE)
    place = Place(environ={"PYTHONPATH": f"{installed}:{ROOT}:{ROOT / 'client'}"})
    job = start_job(Plan(), 2, "--ft-preload=takes_long", "--ft-warm-start=on", place=place)
    job.until((tmp_path / "importing").exists, "the import")
    job.process.send_signal(number)
    assert job.finish(ENDS_S) == code, job.tail()
    nothing_left(job)
