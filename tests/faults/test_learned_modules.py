"""Modules that the ranks of the first cycle import, and that those of the next find imported (`--ft-preload auto`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.test_attribution import script
from tests.faults.training import Plan

TRAINING = """
import os, pathlib, signal, sys, time

ran = []
sys.addaudithook(lambda event, words: ran.append(words[0].co_filename) if event == "exec" else None)
cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

is_hidden = "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch) and "sympy" not in sys.modules
had = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
def seeds(): return torch.manual_seed is torch.random.manual_seed
is_usual = seeds()
seeded = []
if pathlib.Path("exchanges").exists():
    usual = torch.manual_seed
    torch.manual_seed = lambda seed: seeded.append(seed) or usual(seed)
if cycle == 1 and pathlib.Path("differs").exists():
    os.environ["TORCHDYNAMO_VERBOSE"] = "1"
    import torch._dynamo
import ft_client as ft

dist.init_process_group("gloo")
client = ft.RankMonitorClient()
client.init_workload_monitoring()
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
client.report_iteration(cycle)
times = sum(name.endswith(("/torch/_dynamo/__init__.py", "/sympy/__init__.py")) for name in ran)
print(f"cycle {cycle}: hidden {is_hidden}, ran {times}, had {had}, has {os.environ['TORCHINDUCTOR_CACHE_DIR'] != had}, "
      f"there {torch._dynamo is sys.modules['torch._dynamo']}")
print(f"cycle {cycle}: seeds as usual {is_usual}, then {seeds()}")
torch.manual_seed(5)
print(f"cycle {cycle}: the script's own function got {seeded}")
if cycle == 0:
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
client.shutdown_workload_monitoring()
del model, optimizer  # else the model owns the group last, and torch may wait for ever for the group's thread
dist.destroy_process_group()
"""
"""What a rank of each cycle sees of what `DistributedDataParallel()` imports; each run of code is an audit event."""
LEARNS_S = 90.0


@pytest.fixture(autouse=True)
def no_folder_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of `torch._dynamo` sets this variable, also in the process of the tests."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def run(start_job: StartJob, folder: Path, preload: str = "auto") -> Job:
    """A job of which a rank dies after it has told what it imports."""
    job = start_job(Plan(), 2, "--max-restarts=1", f"--ft-preload={preload}", script=script(folder, TRAINING))
    job.until(lambda: job.output.count("cycle 0: hidden True, ran 2, had None, has True") == 2, "the first step")
    return job


def learned(job: Job) -> dict[str, Any]:
    (line,) = job.until(lambda: job.journal("modules_preloaded"), "the next zygote", LEARNS_S)
    return line


def test_ranks_find_imported_what_those_before_them_have_imported(start_job: StartJob, tmp_path: Path) -> None:
    job = run(start_job, tmp_path)
    line = learned(job)
    assert {"torch", "sympy"} <= set(line["packages"]) and line["modules"] > 100, line
    (tmp_path / "go").touch()
    assert job.finish() == 0, job.tail()
    assert job.output.count("cycle 1: hidden True, ran 0, had None, has True, there True") == 2, job.tail()
    (exchanges,) = {line.partition("cycle 0: ")[2] for line in job.output.splitlines() if "cycle 0: seeds as" in line}
    assert exchanges.startswith("seeds as usual True") and job.output.count(f"cycle 1: {exchanges}") == 2, job.tail()


def test_none_learns_nothing(start_job: StartJob, tmp_path: Path) -> None:
    job = run(start_job, tmp_path, "none")
    (tmp_path / "go").touch()
    assert job.finish() == 0, job.tail()
    assert job.output.count("cycle 1: hidden True, ran 2, had None, has True, there True") == 2, job.tail()
    assert job.journal("modules_preloaded") == []
    assert "cannot be none" not in job.output, job.tail()


def test_a_script_that_changes_later_what_they_read_imports_anew(start_job: StartJob, tmp_path: Path) -> None:
    job = run(start_job, tmp_path)
    learned(job)
    (tmp_path / "differs").touch()
    (tmp_path / "go").touch()
    assert job.finish() == 0, job.tail()
    assert job.output.count("cycle 1: hidden True, ran 2, had None, has True, there True") == 2, job.tail()
    assert "it has modules that are not what a rank needs" in job.output, job.tail()


def test_a_function_that_the_script_put_in_the_place_of_an_exchanged_one_stays_in_use(
    start_job: StartJob, tmp_path: Path
) -> None:
    """`torch._dynamo` exchanges `torch.manual_seed`; a script that did so before its import keeps its own function."""
    (tmp_path / "exchanges").touch()
    job = run(start_job, tmp_path)
    learned(job)
    (tmp_path / "go").touch()
    assert job.finish() == 0, job.tail()
    for cycle in range(2):
        assert job.output.count(f"cycle {cycle}: the script's own function got [5]") == 2, job.tail()
