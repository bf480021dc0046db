"""Preemption of a job on two nodes: whichever agent is told, all ranks stop after the same step, saved."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.faults.training import Plan, PlannedFault
from tests.ft_launcher.conftest import needs
from tests.nodes.agents import Agent, Agents
from tests.nodes.conftest import StartAgents
from tests.program import ROOT

EXAMPLE = ROOT / "scripts" / "examples" / "preemption.py"
QUICK = ("--ft-node-timeout=5", "--ft-node-beat=0.5")
PAIR = ("--nnodes=2", *QUICK)
PREEMPTED, KILLED = 86, 87
LIMIT_S = 240.0
MANY, MORE = 2000, 3  # steps: more than are made before the signal, and those that come after all
SCRIPT = """
import runpy, sys
sys.argv = [{example!r}, "--folder", sys.argv[1] + "/{state}", "--steps", "{steps}", "--step-s", "{step_s}"]
if __name__ == "__main__":
    runpy.run_path({example!r}, run_name="__main__")
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A TMPDIR with a short path: loader workers make Unix sockets in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class Runs:
    """Jobs of two agents, one after the other, over the same checkpoints unless another `state` is named."""

    def __init__(self, on_loopback: StartAgents, folder: Path, short: Path) -> None:
        self._start, self._folder, self._short, self._count = on_loopback, folder, short, 0

    def begin(
        self, *flags: str, steps: int = MANY, step_s: float = 0.05, state: str = "state", store_apart: bool = False
    ) -> Agents:
        """The next job."""
        self._count += 1
        script = self._folder / f"script{self._count}.py"
        script.write_text(SCRIPT.format(example=str(EXAMPLE), state=state, steps=steps, step_s=step_s))
        for file in (*self._folder.glob("agent*.output"), *self._folder.glob("agent*.journal/*")):
            file.unlink()
        more = {"nproc": 1, "script": script, "tmp": self._short, "store_apart": store_apart}
        return self._start(2, Plan(), *flags, **more)  # type: ignore[arg-type]


def step_of(agent: Agent) -> int:
    """The last step that the rank of a node told of."""
    return max(map(int, re.findall(r"^rank \d: step (\d+)$", agent.output, re.MULTILINE)), default=0)


def is_preempted(agents: Agents, told: Collection[int], after: int) -> int:
    """Tells some agents to end once the ranks have come so far; returns the step that all have saved."""
    agents.until(lambda: min(map(step_of, agents)) > after, f"step {after + 1}", LIMIT_S)
    for number in told:
        agents[number].process.send_signal(signal.SIGTERM)
    agents.end(PREEMPTED, PREEMPTED, limit_s=LIMIT_S)
    assert step_of(agents[0]) == step_of(agents[1]), agents.tail()
    for agent in agents:
        assert not agent.journal("decision") and not agent.journal("fault"), agents.tail()
        assert agent.cycles == [0] and "Traceback" not in agent.output, agents.tail()
    return step_of(agents[0])


def weights(agents: Agents) -> set[str]:
    agents.end(0, 0, limit_s=LIMIT_S)
    return {found for agent in agents for found in re.findall(r"steps done, weights (.+)", agent.output)}


def test_whoever_is_told_all_stop_and_resume_with_the_same_weights(
    on_loopback: StartAgents, tmp_path: Path, short: Path
) -> None:
    runs, step = Runs(on_loopback, tmp_path, short), 0
    for told in ((1,), (0,), (0, 1)):
        agents = runs.begin(*PAIR)
        former, step = step, is_preempted(agents, told, step)
        assert all(agent.output.count(f"resumed after step {former}") == int(former > 0) for agent in agents)
    resumed = weights(runs.begin(*PAIR, steps=step + MORE, step_s=0))
    calm = weights(runs.begin(*PAIR, steps=step + MORE, step_s=0, state="calm"))
    assert resumed == calm and len(calm) == 1


@pytest.mark.parametrize(("told", "apart"), [(1, False), (0, True)], ids=["a member", "the coordinator"])
def test_those_that_are_enough_go_on_and_nothing_is_charged(
    on_loopback: StartAgents, tmp_path: Path, short: Path, told: int, apart: bool
) -> None:
    agents = Runs(on_loopback, tmp_path, short).begin("--nnodes=1:2", *QUICK, steps=60, store_apart=apart)
    agents.until_cycle_of(2, LIMIT_S)
    agents.until(lambda: min(map(step_of, agents)) > 0, "step 1", LIMIT_S)
    left, stayed = agents[told], agents[1 - told]
    left.process.send_signal(signal.SIGTERM)
    agents.end(*(PREEMPTED if agent is left else 0 for agent in agents), limit_s=LIMIT_S)
    assert f"resumed after step {step_of(left)}" in stayed.output and step_of(stayed) == 60, agents.tail()
    assert not stayed.journal("decision", "fault"), agents.tail()


@pytest.mark.parametrize(("before", "code"), [("", PREEMPTED), ("signal.signal(15, signal.SIG_IGN)", KILLED)])
def test_ranks_that_do_not_stop_by_themselves(on_loopback: StartAgents, tmp_path: Path, before: str, code: int) -> None:
    """Without a handler they end at once, and those that ignore the signal are killed: on both nodes."""
    script = tmp_path / "script.py"
    script.write_text(f"import signal, time\n{before}\nprint('runs', flush=True)\ntime.sleep(3600)\n")
    agents = on_loopback(2, Plan(), *PAIR, "--ft-preemption-grace=2", nproc=1, script=script)
    agents.until(lambda: all("runs" in agent.output for agent in agents), "the ranks")
    agents[1].process.send_signal(signal.SIGTERM)
    agents.end(code, code)
    assert "is preempted: told to end by SIGTERM" in agents[0].journal("job_end")[0]["reason"], agents.tail()


def test_a_named_signal_reaches_the_ranks_of_all_nodes_as_itself(on_loopback: StartAgents, tmp_path: Path) -> None:
    named = "--signals-to-handle=SIGTERM,SIGUSR1"
    needs(named)
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(print('got USR1', flush=True)))\n"
        "print('runs', flush=True)\ntime.sleep(3600)\n"
    )
    agents = on_loopback(2, Plan(), *PAIR, named, nproc=1, script=script)
    agents.until(lambda: all("runs" in agent.output for agent in agents), "the ranks")
    agents[1].process.send_signal(signal.SIGUSR1)
    agents.end(PREEMPTED, PREEMPTED)
    assert all("got USR1" in agent.output for agent in agents), agents.tail()


@pytest.mark.parametrize("told", [0, 1])
def test_a_node_that_is_told_to_end_while_a_cycle_forms_is_heard(
    on_loopback: StartAgents, tmp_path: Path, told: int
) -> None:
    """Its ranks have failed, so there are none to report as preempted. Node 0 hosts the store."""
    checks, forms = tmp_path / "checks", tmp_path / "forms"
    plan = Plan((PlannedFault("SIGKILL", iteration=4, rank=told),))
    agents = on_loopback(0, plan, "--nnodes=2", "--max-restarts=2", *QUICK)
    # The second check of that node, before its second cycle, takes longer than the other node waits for it.
    slow = f"--ft-node-check=test ! -e {checks} || {{ touch {forms}; sleep 100; }}; touch {checks}"
    for number in (0, 1):
        agents.join(f"--node-rank={number}", *[slow] * (number == told), nproc=1)
    agents.until(forms.exists, "the formation of the second cycle")
    agents[told].process.send_signal(signal.SIGTERM)
    agents.end(PREEMPTED, PREEMPTED, limit_s=20)
    other = agents[1 - told]
    assert "told to end by SIGTERM" in other.journal("job_end")[0]["reason"], other.tail()


SAVER = """
import datetime, os, pathlib, signal, sys, time
import torch.distributed as dist
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
(folder / f"runs-{rank}").touch()
while not told:
    time.sleep(0.01)
(folder / f"saves-{rank}").touch()
while rank == 1 and not (folder / "saved").exists():
    time.sleep(0.01)
store = dist.TCPStore(*address, is_master=False, timeout=datetime.timedelta(seconds=10))
store.set("saved", str(rank))
print("rank", rank, "has saved", flush=True)
"""


@pytest.mark.parametrize(
    ("told", "apart"), [(0, False), (1, False), (0, True)], ids=["the host", "the other", "the host of the cycle's"]
)
def test_the_host_of_a_store_stays_while_ranks_of_another_node_save(
    on_loopback: StartAgents, tmp_path: Path, told: int, apart: bool
) -> None:
    """Longer than a node has to leave, and than a lease: the ranks there lose neither the store nor their lives."""
    script = tmp_path / "script.py"
    script.write_text(SAVER)
    agents = on_loopback(0, Plan(), *PAIR, store_apart=apart, script=script)
    for number in (0, 1):
        agents.join(f"--node-rank={number}", nproc=1)
    agents.until(lambda: all((tmp_path / f"runs-{rank}").exists() for rank in (0, 1)), "the ranks")
    assert agents[0].global_ranks(0) == {0}, agents.tail()
    agents[told].process.send_signal(signal.SIGTERM)
    agents.until(lambda: "rank 0 has saved" in agents[0].output, "the end of rank 0")
    agents.stay(12)
    (tmp_path / "saved").touch()
    agents.end(PREEMPTED, PREEMPTED, limit_s=20)
    assert "rank 1 has saved" in agents[1].output, agents.tail()


def test_the_host_of_a_store_does_not_stay_beyond_its_grace(on_loopback: StartAgents, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAVER)
    agents = on_loopback(0, Plan(), *PAIR, script=script)
    for number, grace_s in ((0, 2), (1, 3600)):
        agents.join(f"--node-rank={number}", f"--ft-preemption-grace={grace_s}", nproc=1)
    agents.until(lambda: all((tmp_path / f"runs-{rank}").exists() for rank in (0, 1)), "the ranks")
    agents[0].process.send_signal(signal.SIGTERM)
    agents.until((tmp_path / "saves-1").exists, "rank 1 to save")
    assert agents[0].finish(30) == PREEMPTED, agents.tail()
    (tmp_path / "saved").touch()
    agents.until(lambda: agents[1].process.poll() is not None, "the end of the other node")


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "meanwhile"])
def test_the_host_of_a_store_does_not_stay_for_a_node_that_is_lost(
    on_loopback: StartAgents, tmp_path: Path, is_before: bool
) -> None:
    """Its own grace of an hour is no reason: the coordinator says that the ranks of that node have ended."""
    script = tmp_path / "script.py"
    script.write_text(SAVER)
    loss = ("--ft-node-timeout=2", "--ft-node-beat=0.2", "--ft-restart-policy=min-healthy")
    agents = on_loopback(0, Plan(), "--nnodes=1:2", *loss, "--ft-preemption-grace=3600", script=script)
    for number in (0, 1):
        agents.join(f"--node-rank={number}", nproc=1)
    agents.until(lambda: all((tmp_path / f"runs-{rank}").exists() for rank in (0, 1)), "the ranks")
    assert agents[0].global_ranks(0) == {0}, agents.tail()
    if is_before:
        agents.lose(agents[1])
        agents.stay(4)  # longer than the node timeout: min-healthy goes on without that node
    agents[0].process.send_signal(signal.SIGTERM)
    if not is_before:
        agents.until((tmp_path / "saves-1").exists, "rank 1 to save")
        agents.lose(agents[1])
    assert agents[0].finish(60) == PREEMPTED, agents.tail()
