"""A rendezvous handler of another package, found by its entry point: it runs as it is, with our cycles over it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left, result_is_fault_free
from tests.faults.job import Place
from tests.faults.training import Plan, PlannedFault
from tests.ports import free_port
from tests.program import ROOT

WORLD = 2
PACKAGE = """
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


class Handler(DynamicRendezvousHandler):
    def get_backend(self):
        return "theirs"

    def next_rendezvous(self):
        found = super().next_rendezvous()
        print("their handler gave rank", found.rank, flush=True)
        return found


def handler():
    def create(parameters):
        backend, store = create_backend(parameters)
        nodes = parameters.min_nodes, parameters.max_nodes
        return Handler.from_backend(parameters.run_id, store, backend, *nodes, parameters.local_addr)

    return create
"""


def test_it_runs_as_it_is(start_job: StartJob, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "theirs-1.dist-info").mkdir(parents=True)
    (site / "their_package.py").write_text(PACKAGE)
    (site / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (site / "theirs-1.dist-info" / "entry_points.txt").write_text(
        "[torchrun.handlers]\ntheirs = their_package:handler\n"
    )
    there = Place(environ={"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{site}"})
    flags = ("--rdzv-backend=theirs", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--max-restarts=1")
    job = start_job(Plan((PlannedFault("SIGKILL", rank=1),)), WORLD, *flags, place=there)
    assert job.finish() == 0, job.tail()
    nothing_left(job)
    result_is_fault_free(job, WORLD)
    assert job.output.count("their handler gave rank 0") == 2, job.tail()
    assert [line["cycle"] for line in job.journal("cycle_start")] == [0, 1]
    assert [(fault["kind"], fault["rank"]) for fault in job.journal("fault")] == [("signal", 1)]
