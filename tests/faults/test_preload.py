"""Modules that are imported before the ranks are forked (`--ft-preload`): what ranks see of them, and a signal to the
launcher meanwhile: it ends, and nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Place
from tests.faults.test_attribution import script
from tests.faults.training import Plan
from tests.program import ROOT

PART = """
import sys, torch

ran = []
is_hidden = "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
sys.addaudithook(lambda event, words: ran.append(words[0].co_filename) if event == "exec" else None)
import torch._dynamo

times = sum(name.endswith("torch/_dynamo/__init__.py") for name in ran)
print(f"hidden: {is_hidden}; code run: {times}; there: {torch._dynamo is sys.modules['torch._dynamo']}")
"""
"""Whether a part of torch shows before it is imported, and whether its code is run then: each run is an audit event."""
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


@pytest.mark.parametrize(("preload", "times"), [("torch._dynamo", 0), ("json", 1)])
def test_a_part_of_a_package_is_imported_before_the_fork_and_hidden(
    start_job: StartJob, tmp_path: Path, preload: str, times: int
) -> None:
    flags = (f"--ft-preload={preload}", "--ft-warm-start=on")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, PART))
    assert job.finish() == 0, job.tail()
    assert job.output.count(f"hidden: True; code run: {times}; there: True") == 2, job.tail()
