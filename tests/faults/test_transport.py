"""Hangs in which all ranks are in one collective, since the network is gone: what the launcher says with NCCL's RAS.

The ranks run on CPU, so that a server of ours stands for NCCL's, and the network is that of gloo.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place
from tests.faults.training import Plan
from tests.nccl_ras_server import Server
from tests.ports import free_port

WORKER, LAUNCHER = (Path(__file__).with_name(name) for name in ("transport_worker.py", "launcher_with_nccl.py"))
RANKS = 4
LIMIT_S = 8  # a step takes milliseconds; on a busy machine its first one makes connections for seconds
HAS_RECORDER = hasattr(torch.distributed.distributed_c10d, "_dump_fr_trace_json") or hasattr(
    torch._C._distributed_c10d, "_dump_fr_trace_json"
)

pytestmark = pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder that answers in JSON")


def with_nccl(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    """Starts the launcher as one whose torch has NCCL."""
    assert words[:3] == [sys.executable, "-m", "ft_launcher"]
    return subprocess.Popen([words[0], str(LAUNCHER), *words[3:]], **more)


@pytest.mark.parametrize("dead", [{2}, set()], ids=["one is given up", "all are reached"])
def test_the_network_is_gone(start_job: StartJob, tmp_path: Path, dead: set[int]) -> None:
    jobs: list[Job] = []
    port = free_port()

    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        pids = {rank["rank"]: rank["pid"] for rank in jobs[0].journal("cycle_start")[0]["ranks"]}
        ranks = [
            {"rank": rank, "host": "10.0.0.1", "pid": pid, "status": {"considered_dead": rank in dead}}
            for rank, pid in pids.items()
        ]
        of_all = {
            "size": RANKS,
            "ranks": [rank for rank in ranks if rank["rank"] not in dead],
            "missing_ranks": [rank for rank in ranks if rank["rank"] in dead],
        }
        connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n" + json.dumps({"communicators": [of_all]}).encode())
        connection.shutdown(socket.SHUT_RDWR)

    server = Server(("127.0.0.1", port), answer)
    place = Place(with_nccl, environ={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"})
    limits = (f"--ft-rank-section-timeouts=step:{LIMIT_S}", "--max-restarts=0")
    try:
        jobs.append(start_job(Plan(), RANKS, *limits, script=WORKER, place=place))
        assert jobs[0].finish(180) != 0, jobs[0].tail()
    finally:
        server.close()
    (evidence,) = jobs[0].journal("evidence")
    assert evidence["nccl"] is not None, jobs[0].tail()
    assert (evidence["nccl"]["processes"], evidence["nccl"]["missing_count"]) == (RANKS, len(dead))
    (fault,) = jobs[0].journal("fault")
    assert (fault["kind"], fault["finding"], set(fault["blamed"])) == ("hang", "transport", dead), jobs[0].tail()
    if dead:
        assert fault["rank"] in dead, jobs[0].tail()
        assert (
            "it is given up by NCCL's RAS, which cannot reach it, while all 4 ranks are in all_reduce" in fault["what"]
        )
    else:
        assert "all 4 ranks are in all_reduce" in fault["hint"], jobs[0].tail()
        assert fault["hint"].endswith("the network, or a device; NCCL's RAS reaches all 4")
