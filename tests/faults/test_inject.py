"""`--ft-inject` in whole jobs, with a training that knows nothing of it: each fault is told, and the job goes on.

A job of several cycles takes one fault in each, so that a few jobs see all kinds.
"""

from __future__ import annotations

from pathlib import Path

from rank_monitor.contract import env
from tests.faults.conftest import StartJob
from tests.faults.invariants import GIVE_UP, Told, holds, nothing_left
from tests.faults.job import Job, Place
from tests.faults.training import Plan

RESTARTS = ("--max-restarts=9", "--ft-max-no-progress-cycles=0", "--workers-stop-timeout=5")
QUICK_STEPS = "--ft-rank-section-timeouts=step:1"


def faults(*texts: str) -> list[str]:
    """One fault per cycle."""
    return [f"--ft-inject={text},cycle:{cycle}" for cycle, text in enumerate(texts)]


def injected(job: Job) -> list[tuple[int, int, str, str]]:
    """What the journal tells of faults on purpose: cycle, rank, fault, where."""
    return [(line["cycle"], line["rank"], line["fault"], line["at"]) for line in job.journal("fault_on_purpose")]


def test_ranks_that_die(start_job: StartJob) -> None:
    """By sections after the first cycle: they come in each, wherever the ranks resume."""
    story = {
        "rank:1,kind:sigkill,step:1": "signal",
        "rank:0,kind:exception,section:checkpointing": "exception",
        "rank:1,kind:base_exception,section:step": "exception",
        "rank:0,kind:exit,code:3,section:setup": "exit",
        "rank:1,kind:oom,section:step": "exception",
        "rank:0,kind:sigabrt,section:waiting": "signal",
        "rank:1,kind:sigsegv,section:step": "signal",
    }
    job = start_job(Plan(), 2, *RESTARTS, *faults(*story))
    holds(job, 0, [Told(kind, {int(text[5])}) for text, kind in story.items()])
    places = [f"in {text.rpartition(',')[2].replace(':', ' ')}" for text in story]
    assert injected(job) == [
        (cycle, int(text[5]), f"{text},cycle:{cycle}", at.replace("in step", "at step"))
        for cycle, (text, at) in enumerate(zip(story, places, strict=True))
    ]
    hints = [line["hint"] for line in job.journal("fault")]
    assert hints == [f"a fault on purpose, {at}: {fault}" for _, _, fault, at in injected(job)]


OPTIMIZES = """
import torch

weights = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(5):
    optimizer.step()
"""


def test_steps_of_an_optimizer_in_a_fork(start_job: StartJob, tmp_path: Path) -> None:
    """The script knows nothing of us, and torch is given to it loaded at its import."""
    script = tmp_path / "train.py"
    script.write_text(OPTIMIZES)
    flags = ("--max-restarts=1", "--ft-warm-start=on", "--ft-inject=rank:0,kind:sigkill,step:3")
    job = start_job(Plan(), 1, *flags, script=script)
    assert job.finish(120) == 0, job.tail()
    assert [one[3] for one in injected(job)] == ["at step 3"], job.tail()


def test_ranks_that_hang(start_job: StartJob) -> None:
    kinds = ["sigstop", "sleep", "gil_sleep", "livelock"]
    texts = [f"rank:1,kind:{kind},section:step,step:{step}" for step, kind in enumerate(kinds, start=2)]
    job = start_job(Plan(), 2, *RESTARTS, QUICK_STEPS, *faults(*texts))
    holds(job, 0, [Told("hang", {1}, "section:step")] * len(kinds))
    assert [one[0] for one in injected(job)] == [0, 1, 2, 3]


def test_a_random_rank_of_the_first_cycle_from_the_environment(start_job: StartJob) -> None:
    """A restarted job does not get the fault again: the fault is one of the first cycle."""
    place = Place(environ={env.INJECT: "kind:rank_killed,delay:0.1,seed:1"})
    job = start_job(Plan(hold=4), 2, "--max-restarts=1", place=place)
    job.until_ranks_train(4, cycle=1)
    job.go()
    job.finish()
    ((cycle, rank, _, at),) = injected(job)
    holds(job, 0, [Told("signal", {rank})])
    assert cycle == 0 and f"FT: Simulating fault: rank_killed; rank to fail: {rank}; {at}" in job.output


def test_simulated_faults_of_the_peers_are_reported_as_on_purpose(start_job: StartJob) -> None:
    """From a script, as Lightning's callback has it, and from the variable; nothing else asks for a fault."""
    script = Path(__file__).with_name("simulated_fault_worker.py")
    place = Place(environ={env.SIMULATED_FAULT: "rank_killed;1;2"})
    job = start_job(Plan(), 2, "--max-restarts=1", script=script, place=place)
    assert job.finish() != 0, job.tail()
    nothing_left(job)
    happened = {one[:3] for one in injected(job)}
    # The variable's fault happens in the first cycle, too, where the ranks are slow to end.
    assert happened - {(0, 1, "rank:1,kind:rank_killed,cycle:any")} == {
        (0, 0, "rank:0,kind:rank_killed,cycle:any"),
        (1, 1, "rank:1,kind:rank_killed,cycle:any"),
    }
    for _, rank, fault, at in injected(job):
        assert f"ft_launcher: a fault is injected into rank {rank} {at}: {fault}" in job.output
    hints = [line["hint"] for line in job.journal("fault")]
    assert hints and all(hint.startswith("a fault on purpose, after ") for hint in hints), job.tail()


def test_in_every_cycle_when_asked(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--max-restarts=1", "--ft-inject=rank:1,kind:exit,code:9,section:setup,cycle:any")
    holds(job, 9, [Told("exit", {1}), Told("exit", {1}, action=GIVE_UP)])
    assert [one[0] for one in injected(job)] == [0, 1]


def test_monitor_and_zygote_are_replaced_and_the_training_goes_on(start_job: StartJob) -> None:
    """A slow rank, a NaN that nobody looks at, a short sleep, and what cannot be done here harm nobody either."""
    texts = [
        "rank:1,kind:kill_monitor,step:2",
        "rank:0,kind:kill_zygote,step:3",
        "rank:1,kind:straggle,factor:2,step:4",
        "rank:0,kind:nan,step:5",
        "rank:0,kind:sleep,for:0.1,step:6",
        "rank:1,kind:device_error,step:7",
        "rank:0,kind:cut_network,interface:nosuch,step:8",
    ]
    job = start_job(Plan(), 2, "--ft-warm-start=on", *(f"--ft-inject={text}" for text in texts))
    holds(job, 0)
    assert sorted(one[2] for one in injected(job)) == sorted(texts)
    assert [line["rank"] for line in job.journal("monitor_replaced")] == [1]
    assert "The zygote was lost" in job.output
    assert "the network was not cut: interface nosuch: No such device" in job.output


def test_the_launcher_itself_is_killed(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--ft-inject=rank:1,kind:kill_agent,step:2")
    assert job.finish() == 137
    nothing_left(job)
    assert injected(job) == [(0, 1, "rank:1,kind:kill_agent,step:2", "at step 2")]


def test_where_no_rank_is_ours_it_is_said(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    job = start_job(Plan(), 1, "--no-python", "--ft-inject=kind:kill_monitor", script=script)
    assert job.finish() == 0
    assert "--ft-inject does nothing: the ranks are no Python scripts" in job.output
