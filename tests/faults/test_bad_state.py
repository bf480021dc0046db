"""Real jobs whose state in memory is bad: it is set aside, and the training goes on from an older one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import decided_again, nothing_left
from tests.faults.job import Job
from tests.faults.test_memory_checkpoint import EVERY, WORKER, ends, write_plan
from tests.faults.training import Plan
from tests.ports import free_port

FLAGS = (f"--ft-memory-interval={EVERY}", "--max-restarts=20")


def decided(job: Job, name: str) -> list[Any]:
    return [event[name] for event in job.journal("decision")]


def test_a_nan_that_was_saved_is_left_behind(start_job: StartJob, tmp_path: Path) -> None:
    """The weights become NaN after step 18, and are saved after step 20. The state of step 15 is good."""
    write_plan(tmp_path, [(0, 18, [0, 1], "spoils_the_weights")], prints_after=20)
    watch = ("--ft-watch-log=nanogpt", "--ft-watch-log-nan=fault")
    job = start_job(Plan(), 2, *FLAGS, *watch, script=WORKER)
    ends(job, 2, start=15)
    assert decided(job, "set_aside_from") == [0, 0, 20]
    assert decided(job, "action") == ["restart"] * 3
    assert decided(job, "charged") == [True] * 3
    assert (
        "from an older state than that of step 20, from which the job failed twice (loss is not finite)" in job.output
    )
    decided_again(job.journal_folder)
    nothing_left(job)


def test_an_error_of_the_program_ends_the_job_when_no_state_helps(start_job: StartJob, tmp_path: Path) -> None:
    """There are two states in memory: each is tried twice, then there are three starts without a state."""
    write_plan(tmp_path, [(-1, 22, [1], "raises")])
    job = start_job(Plan(), 2, "--ft-memory-keep=1", *FLAGS, script=WORKER)
    assert job.finish(240) == 93, job.tail()
    assert decided(job, "set_aside_from") == [0, 0, 20, 0, 15, 0, 0, 0]
    assert decided(job, "no_save_until") == [22] * 7 + [0]
    assert job.output.count("nothing is saved in memory before step 22 is passed") == 7
    decided_again(job.journal_folder)
    nothing_left(job)


@pytest.mark.parametrize(("cycles", "set_aside", "start"), [([1], [0, 20], 15), ([1, 2], [0, 20, 15], 0)])
def test_a_result_in_doubt_leads_to_one_older_state_each_time(
    cycles: list[int], set_aside: list[int], start: int, start_job: StartJob, tmp_path: Path
) -> None:
    """Exit code 16 in a cycle that went on from step 20, where no other node waits: one failure from a state is enough.
    The second time, at the same step, the state of step 15 is set aside too, and no other one is left."""
    in_doubt = [(cycle, 22, [0, 1], "asks_for_other_hardware") for cycle in cycles]
    write_plan(tmp_path, [(0, 22, [1], "dies_at_once"), *in_doubt])
    job = start_job(Plan(), 2, "--ft-memory-keep=1", *FLAGS, script=WORKER)
    ends(job, 2, start)
    assert decided(job, "set_aside_from") == set_aside
    assert decided(job, "action") == ["restart"] * len(set_aside)
    assert [event["step"] for event in job.journal("memory_loaded")] == [0, 20, 15, 0][: len(set_aside) + 1]
    decided_again(job.journal_folder)
    nothing_left(job)


def test_a_result_in_doubt_ends_the_job_when_no_state_is_left(start_job: StartJob, tmp_path: Path) -> None:
    in_doubt = [(cycle, 22, [0, 1], "asks_for_other_hardware") for cycle in (1, 2, 3)]
    write_plan(tmp_path, [(0, 22, [1], "dies_at_once"), *in_doubt])
    job = start_job(Plan(), 2, "--ft-memory-keep=1", *FLAGS, script=WORKER)
    assert job.finish(240) == 16, job.tail()
    # The last cycle began without a state: what it saved, from step 1 on, would be kept for no next start.
    assert decided(job, "set_aside_from") == [0, 20, 15, 1]
    decided_again(job.journal_folder)
    nothing_left(job)


def test_a_kill_sets_no_state_aside(start_job: StartJob, tmp_path: Path) -> None:
    faults = [(cycle, 22, [1], "dies_at_once") for cycle in range(3)]
    write_plan(tmp_path, faults)
    job = start_job(Plan(), 2, *FLAGS, script=WORKER)
    ends(job, 2, start=20)
    assert decided(job, "set_aside_from") == decided(job, "no_save_until") == [0, 0, 0]


def test_two_nodes_set_the_same_state_aside(start_job: StartJob, tmp_path: Path) -> None:
    """The rank of one node fails. The coordinator tells the launcher of the other one, which marks its folder too."""
    write_plan(tmp_path, [(cycle, 22, [1], "raises") for cycle in range(3)])
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", *FLAGS),
    )
    nodes = [start_job(Plan(), 1, *flags, name=name, script=WORKER) for name in ("first", "second")]
    assert [node.finish(240) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for rank in range(2):
        found = json.loads((tmp_path / f"end-{rank}").read_text())
        assert (found["start"], found["same"]) == (15, True)
    for node in nodes:
        assert [event["step"] for event in node.journal("memory_loaded")] == [0, 20, 20, 15]
