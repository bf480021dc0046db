"""Two nodes by static rendezvous: the first cycle at the address given, each later one with a fresh store."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

from tests.ports import free_port
from tests.program import ONE_TRY, clean_environment, ended, started

LIMIT_S = 150

WORKER = """
import os, signal, torch.distributed as dist
dist.init_process_group("gloo")
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"up {rank} {count} {os.environ['MASTER_PORT']} {os.environ['MASTER_ADDR']}\\n".encode())
dist.barrier()  # both have said it
if count == "0":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""


def test_both_nodes_restart_with_one_count_and_a_fresh_store(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    port = free_port()
    flags = ["--nnodes=2", "--rdzv-backend=static", "--master-addr=LocalHost", f"--master-port={port}"]
    environ = clean_environment(OMP_NUM_THREADS="1", **ONE_TRY)
    launch = [sys.executable, "-m", "ft_launcher", *flags, "--max-restarts=2"]
    with contextlib.ExitStack() as running:
        nodes = [
            running.enter_context(started([*launch, f"--node-rank={node}", "worker.py"], cwd=tmp_path, env=environ))
            for node in range(2)
        ]
        ends = [ended(node, limit_s=LIMIT_S) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    told = [shown for _, shown, _ in ends]
    ups = {rank: re.findall(rf"up {rank} (\d+) (\d+)", told[rank]) for rank in range(2)}
    assert ups[0] == ups[1] and [count for count, _ in ups[0]] == ["0", "1"]
    assert [told[rank].count(" LocalHost\n") for rank in range(2)] == [2, 2], "as given, in each cycle"
    assert int(ups[0][0][1]) == port != int(ups[0][1][1])
