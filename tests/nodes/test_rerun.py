"""A result in doubt under two launchers: the job moves to other hardware, which says what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.training import Plan
from tests.nodes.agents import Agents
from tests.nodes.conftest import StartAgents
from tests.nodes.job_site import NODE
from tests.program import ROOT

EXAMPLE = ROOT / "scripts" / "examples" / "rerun.py"
QUICK = ("--ft-node-timeout=5", "--ft-node-beat=0.5")
LIMIT_S = 240.0
VERDICT = "node n0, device cpu computed iteration 3 of rank 0 wrongly; another device did not"
REASON = f"exit code 17: result could not be validated; {VERDICT}"
SCRIPT = """
import os, runpy, sys, time
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.05)
words = ["--folder", sys.argv[1] + "/checkpoints", "--node", os.environ[{node!r}], *{words!r}]
print("told", os.environ["RANK"], os.environ[{node!r}], os.environ.get("FT_RESULT_IN_DOUBT", "nothing"), flush=True)
sys.argv = [{example!r}, *words]
if __name__ == "__main__":
    runpy.run_path({example!r}, run_name="__main__")
"""


def start(on_loopback: StartAgents, folder: Path, *flags: str, nproc: int, words: tuple[str, ...]) -> Agents:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(node=NODE, example=str(EXAMPLE), words=words))
    return on_loopback(2, Plan(), *flags, *QUICK, nproc=nproc, script=script)


def told(agents: Agents) -> set[tuple[str, str, str]]:
    """What each rank of each cycle was told: its number, its node, and where the one in doubt ran before."""
    lines = [
        line.split(" ", 3)[1:] for agent in agents for line in agent.output.splitlines() if line.startswith("told")
    ]
    return {(rank, node, text if text == "nothing" else where(json.loads(text))) for rank, node, text in lines}


def where(doubt: dict[str, Any]) -> str:
    return f"rank {doubt['rank']}: {doubt['node']}, {doubt['device']}"


def actions(agents: Agents) -> list[tuple[str, bool, int | None]]:
    decided = [line for agent in agents for line in agent.journal("decision")]
    return [
        (line["action"], line["charged"], line["exit_code"]) for line in sorted(decided, key=lambda line: line["t"])
    ]


def test_a_spare_takes_the_place_of_the_broken_device_which_is_named(on_loopback: StartAgents, tmp_path: Path) -> None:
    agents = start(on_loopback, tmp_path, "--nnodes=2", "--ft-spares=1", nproc=1, words=("--broken-node", "n0"))
    agents.until_cycle_of(2)
    spare = agents.join(nproc=1)
    spare.until_event("job_start")
    agents.stay(1)  # the spare has said that it is there
    agents.go()
    agents.end(17, 17, 17, limit_s=LIMIT_S)
    assert told(agents) == {
        ("0", "n0", "nothing"),
        ("1", "n1", "nothing"),
        ("0", "n2", "rank 0: n0, cpu"),
        ("1", "n1", "rank 0: n0, cpu"),
    }
    decided = actions(agents)
    assert set(decided) == {("restart", False, None), ("give up", False, 17)}, agents.tail()
    faults = [line for agent in agents for line in agent.journal("fault")]
    assert {(line["rank"], line["kind"], line["exit_code"]) for line in faults} == {(0, "exit", 16), (0, "exit", 17)}
    for agent in agents:
        (end,) = agent.journal("job_end")
        assert end["reason"].startswith(REASON), agents.tail()
    assert "Possible persistent error! (rank 0, iteration #3, node n0, device cpu" in spare.output
    assert "The launcher moved this job: rank 0 ran on node n0, device cpu before" in spare.output


def test_without_a_spare_the_job_ends_for_the_batch_script_to_move_it(on_loopback: StartAgents, tmp_path: Path) -> None:
    agents = start(on_loopback, tmp_path, "--nnodes=2", nproc=1, words=("--broken-node", "n0"))
    agents.go()
    agents.end(16, 16, limit_s=LIMIT_S)
    assert set(actions(agents)) == {("give up", False, 16)}, agents.tail()


def test_a_spare_comes_to_the_same_result_and_goes_on(on_loopback: StartAgents, tmp_path: Path) -> None:
    agents = start(on_loopback, tmp_path, "--nnodes=1", "--ft-spares=1", nproc=2, words=("--broken-data",))
    agents.until(lambda: any(agent.cycles for agent in agents), "a cycle")
    for agent in agents:
        agent.until_event("job_start")
    agents.stay(1)  # the spare, too, has said that it is there
    agents.go()
    agents.end(0, 0, limit_s=LIMIT_S)
    first, second = (next(a for a in agents if cycle in a.cycles) for cycle in (0, 1))
    assert first is not second and first.cycles == [0] and second.cycles == [1], agents.tail()
    assert actions(agents) == [("restart", False, None)], agents.tail()
    assert "Correct result (but possible Application error)" in second.output, agents.tail()
    assert second.output.count("6 steps done") == 2, agents.tail()
