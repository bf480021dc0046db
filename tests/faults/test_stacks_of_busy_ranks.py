"""Ranks that compute in several threads are asked for their stacks again and again, and train on."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from pathlib import Path

from rank_monitor.contract.wire.messages import END_OF_STACKS
from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.training import Plan
from tests.patience import patient

TIMES = 20
BUSY = """
import random, sys, threading
from pathlib import Path
import torch.distributed as dist

def deep(depth):
    return 1 + deep(depth - 1) if depth else 0

def generate(depth):
    if depth:
        yield from generate(depth - 1)
    yield depth

def compute():
    while not done.exists():
        for _ in range(20):
            deep(random.choice((5, 50, 700)))
            sum(generate(random.choice((3, 80))))

dist.init_process_group("gloo")
done = Path(sys.argv[1], "done")
sys.setrecursionlimit(5000)
threads = [threading.Thread(target=compute) for _ in range(3)]
for thread in threads:
    thread.start()
Path(sys.argv[1], f"computes-{dist.get_rank()}").touch()
compute()
for thread in threads:
    thread.join()
dist.barrier()
"""


def ask(job: Job) -> str:
    """What the launcher answers to a request for the stacks of its ranks."""
    connection = HTTPConnection("localhost", timeout=patient(60))
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(patient(60))
    connection.sock.connect(str(job.runtime_folder() / "status"))
    connection.request("GET", "/stacks")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == 200, text
    return text


def test_busy_ranks_outlive_being_asked(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    job = start_job(Plan(), 2, script=script)
    job.until(lambda: len(list(job.folder.glob("computes-*"))) == 2, "the ranks to compute")
    written = [job.runtime_folder() / f"stacks{local_rank}" for local_rank in range(2)]

    def have_answered() -> bool:
        assert "busy.py" in ask(job)
        return min(file.read_text().count(END_OF_STACKS) for file in written) >= TIMES

    job.until(have_answered, f"{TIMES} answers of each rank")
    (job.folder / "done").touch()
    assert job.finish() == 0, job.tail()
    assert job.journal("verdict", "fault") == [], job.tail()
