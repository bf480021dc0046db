"""Background processes of a node whose ranks succeeded hold up no other node, and no further cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.job import lives
from tests.faults.training import Plan
from tests.nodes import lone_worker
from tests.nodes.agents import Agent, Agents
from tests.nodes.conftest import StartAgents

FLAGS = ("--nnodes=2", "--max-restarts=1", "--ft-linger=none", "--ft-node-timeout=5", "--ft-node-beat=0.5")
UPLOAD = """
import os, pathlib, subprocess, sys, time
folder, rank, cycle = pathlib.Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
upload = f"while [ ! -e {folder}/upload ]; do sleep 0.05; done; touch {folder}/uploaded-{rank}"
"""
BOTH = (
    UPLOAD
    + """
(folder / f"pid-{cycle}-{rank}").write_text(str(subprocess.Popen(["sh", "-c", upload], start_new_session=True).pid))
"""
)
ONE_FAILS = (
    BOTH
    + """
if rank == "1" and cycle == "0":
    while not (folder / "fail").exists():
        time.sleep(0.01)
    sys.exit(3)
"""
)


def started(agents: Agents) -> list[Agent]:
    """The agents, once their ranks of the first cycle have started."""
    return list(agents) if all(agent.cycles for agent in agents) else []


def test_the_other_node_ends_at_once(on_loopback: StartAgents, tmp_path: Path) -> None:
    """Whichever hosts the store: here the node that has nothing to wait for."""
    script = tmp_path / "rank.py"
    script.write_text(UPLOAD + 'if rank == "1":\n    subprocess.Popen(["sh", "-c", upload], start_new_session=True)\n')
    agents = on_loopback(2, Plan(), *FLAGS, nproc=1, script=script)
    agents.until(lambda: any(agent.journal("lingers") for agent in agents), "a node to wait")
    quick, waits = sorted(agents, key=lambda agent: len(agent.journal("lingers")))
    assert quick.finish() == 0, agents.tail()
    assert waits.process.poll() is None, agents.tail()
    (tmp_path / "upload").touch()
    agents.end(0, 0)
    assert (tmp_path / "uploaded-1").exists(), agents.tail()


def test_a_further_cycle_does_not_wait_for_them(on_loopback: StartAgents, tmp_path: Path) -> None:
    """Node 0's rank succeeds, then node 1's fails: what both left is ended before all start again."""
    script = tmp_path / "rank.py"
    script.write_text(ONE_FAILS)
    agents = on_loopback(2, Plan(), *FLAGS, nproc=1, script=script)
    first = next(agent for agent in agents.until(lambda: started(agents), "cycle 0") if agent.global_ranks(0) == {0})
    first.until(lambda: first.journal("rank_exit"), "rank 0 to succeed")
    before = int((tmp_path / "pid-0-0").read_text())
    assert lives(before), "while the other node trains"
    (tmp_path / "fail").touch()
    agents.until(lambda: (tmp_path / "pid-1-0").exists() and (tmp_path / "pid-1-1").exists(), "cycle 1")
    assert not lives(before) and not lives(int((tmp_path / "pid-0-1").read_text())), agents.tail()
    (tmp_path / "upload").touch()
    agents.end(0, 0)
    assert not any(agent.journal("background_ended") for agent in agents), agents.tail()


@pytest.mark.parametrize("store_apart", [False, True])
def test_the_host_of_a_store_stays_while_ranks_of_another_node_run(on_loopback: StartAgents, store_apart: bool) -> None:
    """Without a store of the job's on it, the node of rank 0 hosts that of the cycle."""
    flags = ("--nnodes=2", "--ft-exit-barrier-timeout=1")
    agents = on_loopback(0, Plan(), *flags, store_apart=store_apart, script=Path(lone_worker.__file__))
    for number in (0, 1):
        agents.join(f"--node-rank={number}", nproc=1)
    agents.until_cycle_of(2)
    (agents.folder / lone_worker.done_file(0)).touch()
    agents.until(lambda: agents[0].journal("rank_exit"), "the end of rank 0")
    agents.stay(3)
    (agents.folder / lone_worker.END).touch()
    agents.end(0, 0)
