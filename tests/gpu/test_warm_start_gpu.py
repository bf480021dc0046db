"""Warm start on a GPU: CUDA works in every forked rank, the zygote has none, and memory is free before a cycle."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place
from tests.faults.training import Plan
from tests.program import ROOT

pytestmark = pytest.mark.gpu

RANK = Path(__file__).with_name("cuda_rank.py")
LIMIT_S = 120.0
TOLERANCE_MIB = 512


def begin(start_job: StartJob, nproc: int) -> Job:
    """A job whose ranks all have memory of a GPU in cycle 0."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    job = start_job(Plan(), nproc, "--max-restarts=1", "--ft-warm-start=on", script=RANK)
    job.until(lambda: len(facts_of(job, 0)) == nproc, "CUDA in every rank", LIMIT_S)
    return job


def facts_of(job: Job, cycle: int) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(job.folder.glob(f"facts-{cycle}-*"))]


def driver_files(pid: int) -> list[str]:
    """The files of the driver that a process has open."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith("/dev/nvidia")]


def test_cuda_works_in_every_forked_rank_of_every_cycle(start_job: StartJob, gpus: int) -> None:
    nproc = max(2, gpus)
    job = begin(start_job, nproc)
    job.go()
    assert job.finish(LIMIT_S) == 0, job.tail()
    for cycle in (0, 1):
        ranks = facts_of(job, cycle)
        seen = [(rank["forked"], rank["initialised"], rank["devices"], rank["sum"]) for rank in ranks]
        assert seen == [(True, False, gpus, 512.0**3)] * nproc
        slowest = max(rank["to_first_product_s"] for rank in ranks)
        print(f"cycle {cycle}, {nproc} ranks: slowest from the first line to a matrix product {slowest:.2f} s")


def test_neither_zygote_nor_launcher_has_a_gpu(start_job: StartJob) -> None:
    job = begin(start_job, 1)
    (zygote,) = [pid for pid, words in job.processes().items() if words == "ft_zygote"]
    (rank,) = facts_of(job, 0)
    pids = {"rank": rank["pid"], "zygote": zygote, "launcher": job.process.pid}
    found = {name: driver_files(pid) for name, pid in pids.items()}
    on_gpu = compute_processes()
    job.go()
    assert job.finish(LIMIT_S) == 0, job.tail()
    assert found.pop("rank"), "the rank itself shows no file of the driver: the look is blind"
    assert found == {"zygote": [], "launcher": []}
    assert not {zygote, job.process.pid} & on_gpu


def compute_processes() -> set[int]:
    """Pids that NVML tells; in a container they may be the host's."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return {process.pid for handle in handles for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def test_memory_is_free_before_the_next_cycle(start_job: StartJob) -> None:
    job = begin(start_job, 1)
    job.go()
    assert job.finish(LIMIT_S) == 0, job.tail()
    (first,), (second,) = facts_of(job, 0), facts_of(job, 1)
    assert first["kept_by_the_driver_mib"] > first["in_use_mib"] + first["held_mib"], "the rank held nothing"
    assert second["in_use_mib"] <= first["in_use_mib"] + TOLERANCE_MIB
    assert not job.journal("gpu_memory"), job.tail()
    print(
        f"in use before cycle 0: {first['in_use_mib']:.0f} MiB, while its rank ran:"
        f" {first['kept_by_the_driver_mib']:.0f} MiB, before cycle 1: {second['in_use_mib']:.0f} MiB"
    )


def test_a_preloaded_module_that_uses_cuda_costs_the_warm_start(start_job: StartJob, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "uses_cuda.py").write_text("import torch\ntorch.zeros(1, device='cuda')\n")
    place = Place(environ={"PYTHONPATH": f"{installed}:{ROOT}:{ROOT / 'client'}"})
    flags = ("--max-restarts=1", "--ft-preload=uses_cuda")
    job = start_job(Plan(), 1, *flags, script=RANK, place=place)
    job.go()
    assert job.finish(LIMIT_S) == 0, job.tail()
    assert "Ranks start by exec: CUDA was initialised by an import" in job.output
    assert [rank["forked"] for rank in facts_of(job, 1)] == [False]
