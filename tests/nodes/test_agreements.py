"""What ranks agree on within a host and across hosts: the same answers."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.netns import Network
from tests.patience import patient

RANK = """
import os, sys
import torch.distributed as dist
from ft_client.rank.agreement import group

rank, world, master = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://{master}:29400", rank=rank, world_size=world)
told = {
    "max": group.max_over_ranks([rank, -rank]),
    "min": group.min_over_ranks([rank, -rank]),
    "gather": group.gather_on_rank0([rank]),
    "from rank 0": group.from_rank0(rank + 0.5),
    "union": group.union_over_ranks([f"of {rank}", "both"]),
}
dist.barrier()
dist.destroy_process_group()
print(told, flush=True)
"""
LIMIT_S = patient(120.0)


@pytest.mark.parametrize("nodes", [("a", "a", "a"), ("a", "b", "a")])
def test_the_answers_are_the_same_within_a_host_and_across_hosts(
    network: Network, tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    for name in sorted(set(nodes)):
        network.add(name)
    (tmp_path / "rank.py").write_text(RANK)
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = []
    for rank, node in enumerate(nodes):
        program = [sys.executable, str(tmp_path / "rank.py"), str(rank), str(len(nodes)), network.address(nodes[0])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(network.run(node, program, env=variables, **pipes))
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert ast.literal_eval(out) == {
            "max": [2.0, 0.0],
            "min": [0.0, -2.0],
            "gather": [[0.0], [1.0], [2.0]] if rank == 0 else None,
            "from rank 0": 0.5,
            "union": ["both", "of 0", "of 1", "of 2"],
        }
