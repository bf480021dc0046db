"""Hosts that have IPv6 only: a loopback interface with `::1` alone, and a name with no other address."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.nodes.conftest import require
from tests.nodes.netns import unavailable
from tests.program import output_of

LIMIT_S = 60
RANK = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open(f"rank{rank}.{cycle}", "w").write(f"{os.environ['MASTER_ADDR']} {total.item():g}")
dist.destroy_process_group()
sys.exit(int(cycle == rank == "0"))
"""
LOOPBACK = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; "
NAME = """ip link set lo up; ip addr add fd00::5/128 dev lo nodad
printf '127.0.0.1 localhost\\nfd00::5 v6host\\n' >hosts; mount --bind hosts /etc/hosts; hostname v6host
"""
BOTH = '"$@" & "$@"; code=$?; wait; exit $code'
LAUNCH = (sys.executable, "-m", "ft_launcher", "--max-restarts=1")


def run(folder: Path, begin: str, *words: str) -> None:
    """Runs a shell's words in a host of its own, which `begin` makes."""
    require(unavailable())
    (folder / "train.py").write_text(RANK)
    within = ["unshare", "--net", "--mount", "--uts", "env", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", "sh", "-c"]
    output_of([*within, begin, "sh", *LAUNCH, *words, "train.py"], folder, LIMIT_S)


@pytest.mark.parametrize("words", [("--standalone",), ("--ft-status-port=8123",)], ids=["standalone", "static"])
def test_one_node_whose_loopback_has_no_other_address(tmp_path: Path, words: tuple[str, ...]) -> None:
    run(tmp_path, LOOPBACK + '"$@"', *words, "--nproc-per-node=2")
    found = {file.name: file.read_text() for file in tmp_path.glob("rank*")}
    assert found == {f"rank{rank}.{cycle}": "::1 2" for rank in (0, 1) for cycle in (0, 1)}


def test_nodes_whose_name_has_no_other_address(tmp_path: Path) -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=v6host:29555", "--rdzv-id=job")
    run(tmp_path, NAME + BOTH, *words)
    found = {file.name: file.read_text() for file in tmp_path.glob("rank*")}
    assert found == {f"rank{rank}.{cycle}": "v6host 2" for rank in (0, 1) for cycle in (0, 1)}
