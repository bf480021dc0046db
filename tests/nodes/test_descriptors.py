"""What a job of several nodes costs in descriptors: connections are counted as the kernel has them."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests import program
from tests.faults.training import Plan, PlannedFault
from tests.nodes.agents import Agents
from tests.nodes.conftest import StartAgents
from tests.ports import free_port

AGENTS = 4
SCRIPT = """
import os, resource
print("limit", *resource.getrlimit(resource.RLIMIT_NOFILE))
print(open(f"/proc/{os.getppid()}/limits").read())
"""
LIMITS = (512, 4096)


def connections(job: Agents) -> tuple[Counter[int], int]:
    """The connections to the job's store: by the agent that made them, and those its host has taken."""
    made, taken = Counter[int](), 0
    for agent in job:
        for one in psutil.Process(agent.process.pid).net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED:
                made[agent.number] += one.raddr.port == job.site.port
                taken += one.laddr.port == job.site.port
    return made, taken


def test_a_node_takes_two_connections_of_the_stores_host(on_loopback: StartAgents) -> None:
    """In the first cycle and in those after it; and none to the store of a cycle, but for those of the ranks."""
    plan = Plan((PlannedFault("exception", "between", 4, rank=1),), hold=3)
    job = on_loopback(AGENTS, plan, f"--nnodes={AGENTS}", "--max-restarts=1", nproc=1)
    job.until_train(3, AGENTS)
    made, taken = connections(job)
    job.go()
    assert {number: made[number] for number in range(1, AGENTS)} == dict.fromkeys(range(1, AGENTS), 2)
    assert taken - made[0] == 2 * (AGENTS - 1)
    assert made[0] <= 3, "the host's own: one more, for the coordinator's inbox"
    job.end_well()


def test_the_stores_of_all_cycles_are_let_go(on_loopback: StartAgents) -> None:
    plan = Plan((), hold=3)
    job = on_loopback(2, plan, "--nnodes=2", nproc=1)
    job.until_train(3, 2)
    for agent in job:
        of_store = {job.site.port, *(one for one in listening(job))}
        own = psutil.Process(agent.process.pid).net_connections("tcp")
        to_cycles = [one for one in own if one.raddr and one.raddr.port in of_store - {job.site.port}]
        assert len(to_cycles) <= (agent.number == job.node_of(0).number), "but for the server's own client"
    job.go()
    job.end_well()


def listening(job: Agents) -> set[int]:
    """The ports at which agents of the job listen."""
    found = (one for agent in job for one in psutil.Process(agent.process.pid).net_connections("tcp"))
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("way", [["--ft-warm-start=on"], ["--ft-warm-start=off"], ["--no-python"]], ids=" ".join)
def test_the_launcher_raises_its_soft_limit_and_ranks_have_the_users(way: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script)] if way == ["--no-python"] else [str(script)]
    done = run(tmp_path, LIMITS, *way, "--nproc-per-node=1", *words)
    assert done.returncode == 0, done.stderr
    assert f"limit {LIMITS[0]} {LIMITS[1]}" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == [str(LIMITS[1])] * 2


@pytest.mark.parametrize(
    ("limit", "hosts", "code"), [(256, "1", ExitCode.BAD_CONFIG), (256, "0", ExitCode.BAD_CONFIG)], ids=["host", "node"]
)
def test_a_limit_that_will_not_do_is_an_error_at_the_start(
    limit: int, hosts: str, code: ExitCode, tmp_path: Path
) -> None:
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-conf=is_host={hosts}"]
    done = run(tmp_path, (limit, limit), "--nnodes=100", "--nproc-per-node=2", *meet, "--no-python", "true")
    assert done.returncode == code, done.stderr
    assert f"RLIMIT_NOFILE is {limit}" in done.stderr and "100 nodes with 2 ranks each" in done.stderr


def run(folder: Path, limits: tuple[int, int], *words: str) -> subprocess.CompletedProcess[str]:
    """A launcher under these limits of descriptors, until its end."""
    return program.run(
        [sys.executable, "-m", "ft_launcher", *words],
        folder=folder,
        limit_s=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
