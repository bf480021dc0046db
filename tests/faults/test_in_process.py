"""Level 1 before level 2, with real ranks: what the launcher does about faults of ranks that restart in process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from ft_launcher.tools.commands.replay import decide_again
from ft_launcher.tools.replay.replay import IN_PROCESS, IN_PROCESS_FAULT
from rank_monitor.contract.rounds.round import joining
from tests.faults.conftest import StartJob
from tests.faults.in_process_worker import SAMPLES, STEPS
from tests.faults.invariants import Told, decided_again, healthy_ranks_live, journal_tells, nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan
from tests.ports import free_port

SCRIPT = Path(__file__).with_name("in_process_worker.py")
LATE_SCRIPT = Path(__file__).with_name("late_restart_worker.py")
PREFIX = "in_process/0"


def holding(job: Job, call: str, members: Collection[int]) -> dict[int, int]:
    """Waits until these members, and no others, hold in a round (`CYCLE-ITERATION`); returns member -> pid."""

    def found() -> dict[int, int]:
        return {
            int(file.name.rpartition("-")[2]): json.loads((job.folder / "calls" / file.name).read_text())["pid"]
            for file in (job.folder / "holds").glob(f"{call}-*")
        }

    job.until(lambda: set(found()) == set(members), f"members {members} to hold in {call}")
    return found()


def say(job: Job, call: str, word: str) -> None:
    """Tells the ranks that hold in a round what to do."""
    draft = job.folder / f"draft-{call}"
    draft.write_text(word)
    draft.rename(job.folder / f"word-{call}")


def wants_to_join(job: Job, member: int) -> bool:
    """Whether a rank that was started again has asked to be let in."""
    host, _, port = job.journal("cycle_start")[-1]["master"].rpartition(":")
    store = PrefixStore(PREFIX, TCPStore(host, int(port), timeout=timedelta(seconds=20)))
    return any(entry.entry_rank == member for entry in joining(store).entries())


def ends_well(job: Job, story: Collection[Told] = ()) -> dict[str, Any]:
    """I1 to I6 of a job that came to its end; returns the journal's last line."""
    assert job.finish() == 0, job.tail()
    nothing_left(job)
    total = int((job.folder / "result").read_text())
    assert total == sum(range(SAMPLES * STEPS)), f"I3: {total}\n{job.tail()}"
    healthy_ranks_live(job, story)
    journal_tells(job, 0, story)
    return job.journal("job_end")[0]


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (4, ()),
        (2, ("--ft-warm-start=off", "--tee=3", "--log-dir=logs")),
    ],
    ids=["forks", "programs with files"],
)
def test_a_dead_rank_is_started_again_and_joins_at_the_next_restart(
    start_job: StartJob, nproc: int, flags: tuple[str, ...]
) -> None:
    job = start_job(Plan(), nproc, "--max-restarts=0", *flags, script=SCRIPT)
    pids = holding(job, "0-0", range(nproc))
    os.kill(pids[1], signal.SIGKILL)
    others = set(range(nproc)) - {1}
    assert holding(job, "0-1", others).items() <= pids.items(), "the others are the same processes"
    job.until(lambda: job.journal("started_again") and wants_to_join(job, 1), "the rank to ask to join")
    say(job, "0-1", "raise 0")
    again = holding(job, "0-2", range(nproc))
    assert again[1] not in pids.values()
    say(job, "0-2", "go")
    end = ends_well(job)
    assert (end["restarts_in_process"], end["started_again"], end["taken_over"]) == (2, 1, 0)
    (fault,) = job.journal("in_process_fault")
    assert (fault["rank"], fault["exit_code"], fault["what"]) == (1, -9, "died of SIGKILL")
    first, second = job.journal("in_process_restart")
    assert first["why"] == [{"rank": 1, "interruption": "TERMINATED"}] and first["iteration"] == 1
    why = second["why"][0]
    assert (why["rank"], why["member"], why["interruption"], second["iteration"]) == (0, 0, "EXCEPTION", 2)
    assert why["error"].startswith("Told at ") and "collateral" not in why
    assert [line["iteration"] for line in job.journal("joined")] == [2]
    for text in ("rank 1 (pid", "handled in process", "restarted in process", "was started again"):
        assert text in job.output
    for file in job.folder.glob("logs/*/cycle_0/1/stdout.log"):
        assert [line.split()[-1] for line in file.read_text().splitlines()] == ["0-0", "0-2"], "both wrote to it"
    if flags:
        assert job.output.count("rank 1 holds in") == 2
    replayed = decided_again(job.journal_folder)
    assert replayed.same[IN_PROCESS] >= 4 and replayed.same[IN_PROCESS_FAULT] == 1 and not replayed.left_out
    assert "take_over" in decided_if_rank_zero_were_outside(job)


def decided_if_rank_zero_were_outside(job: Job) -> str:
    """What is decided about the first death, by the same journal but for one state of a wrapper."""
    (file,) = job.journal_folder.glob("journal.*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    decision = next(line for line in lines if line["event"] == "in_process_decision")
    (wrappers,) = decision["known"]["wrappers"]
    decision["known"]["wrappers"] = [
        wrappers | {"local_ranks": [0], "state": "finalized"},
        wrappers | {"local_ranks": wrappers["local_ranks"][1:]},
    ]
    changed = job.folder / "journal.changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, _ = decide_again([changed])
    (difference,) = found.differences
    assert (difference.what, difference.line) == (IN_PROCESS, lines.index(decision) + 1)
    return difference.lines()[1]


def test_a_rank_that_leaves_is_a_loss_and_is_not_started_again(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--max-restarts=0", script=SCRIPT)
    holding(job, "0-0", {0, 1})
    say(job, "0-0", "exit 1")
    holding(job, "0-1", {0})
    job.until(lambda: job.journal("in_process_fault"), "the end of the rank that left")
    say(job, "0-1", "go")
    assert ends_well(job)["started_again"] == 0
    assert job.journal("in_process_fault")[0]["exit_code"] == 3


def test_one_that_vanishes_is_started_again_and_joins_at_once_where_that_is_wanted(start_job: StartJob) -> None:
    """`os._exit` asks no wrapper: a death, whatever the code."""
    job = start_job(Plan(), 2, "--max-restarts=0", "--ft-rejoin=now", script=SCRIPT)
    first = holding(job, "0-0", {0, 1})
    say(job, "0-0", "vanish 1")
    again = holding(job, "0-2", {0, 1})
    assert again[0] == first[0] and again[1] != first[1]
    say(job, "0-2", "go")
    assert ends_well(job)["started_again"] == 1
    assert job.journal("in_process_fault")[0]["exit_code"] == 3
    assert [line["why"][0]["interruption"] for line in job.journal("in_process_restart")] == ["TERMINATED", "JOINING"]


def test_a_rank_that_was_not_let_in_ends_with_the_others(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--max-restarts=0", script=SCRIPT)
    os.kill(holding(job, "0-0", {0, 1})[1], signal.SIGKILL)
    holding(job, "0-1", {0})
    job.until(lambda: job.journal("started_again") and wants_to_join(job, 1), "the rank to ask to join")
    say(job, "0-1", "go")
    assert ends_well(job)["started_again"] == 1
    assert not job.journal("joined")
    assert job.journal("finished_without")[0]["ranks"] == [1]


def test_when_no_rank_is_left_the_cycle_ends(start_job: StartJob) -> None:
    job = start_job(Plan(), 4, "--max-restarts=1", script=SCRIPT)
    for pid in holding(job, "0-0", range(4)).values():
        os.kill(pid, signal.SIGKILL)
    holding(job, "1-0", range(4))
    say(job, "1-0", "go")
    end = ends_well(job, [Told("signal", range(4))])
    assert end["taken_over"] == 1
    assert "no rank of this node" in job.journal("taken_over")[0]["reason"]


def test_a_cleanup_that_hangs_is_cut_off_after_the_grace_and_the_journal_says_so(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--max-restarts=0", "--ft-interrupt-grace=0.5", script=SCRIPT)
    holding(job, "0-0", {0, 1})
    (job.folder / "clings-1").touch()
    say(job, "0-0", "raise 0")
    holding(job, "0-1", {0, 1})
    say(job, "0-1", "go")
    ends_well(job)
    (again,) = job.journal("interrupted_again")
    assert (again["rank"], again["iteration"], again["why"]) == (1, 0, "the interruption is being handled")
    assert again["waited_s"] >= 0.5 and "_cling" in again["stack"]
    assert "interrupted again (--ft-interrupt-grace)" in job.output


def test_off_means_rung_two(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--max-restarts=1", "--ft-inprocess=off", script=SCRIPT)
    os.kill(holding(job, "0-0", {0, 1})[1], signal.SIGKILL)
    holding(job, "1-0", {0, 1})
    say(job, "1-0", "go")
    end = ends_well(job, [Told("signal", {1})])
    assert (end["restarts_in_process"], end["started_again"], end["taken_over"]) == (0, 0, 0)


def test_a_restart_that_comes_to_no_end_within_its_limit_ends_the_cycle(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, "--max-restarts=1", script=LATE_SCRIPT)
    assert job.finish() == 0
    nothing_left(job)
    story = [Told("hang", {0, 1}, "in_process")]
    healthy_ranks_live(job, story)
    (fault,) = job.journal("fault")
    assert (fault["kind"], fault["limit"], fault["cycle"]) == ("hang", "in_process", 0)
    assert "within 1 s" in job.journal("taken_over")[0]["reason"]


def pair(start_job: StartJob, *more: str) -> tuple[Job, Job]:
    """Two nodes of two ranks each; the first one's agent hosts the ranks' store."""
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair")
    conf = "--rdzv-conf=join_timeout=60,last_call_timeout=1"
    nodes = [
        start_job(Plan(), 2, "--nnodes=2", *rendezvous, conf, *more, name=name, script=SCRIPT) for name in ("a", "b")
    ]
    holding(nodes[0], "0-0", range(4))
    first, second = sorted(nodes, key=lambda node: int(node.journal("cycle_start")[0]["node_rank"]))
    return first, second


def test_on_two_nodes_the_store_is_the_other_agents(start_job: StartJob) -> None:
    nodes = _, second = pair(start_job)
    pids = holding(second, "0-0", range(4))
    victim = second.journal("cycle_start")[0]["ranks"][0]["rank"]
    os.kill(pids[victim], signal.SIGKILL)
    others = set(range(4)) - {victim}
    holding(second, "0-1", others)
    second.until(lambda: second.journal("started_again") and wants_to_join(second, victim), "it to ask to join")
    say(second, "0-1", f"raise {min(others)}")
    holding(second, "0-2", range(4))
    say(second, "0-2", "go")
    assert [node.finish() for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for node in nodes:
        nothing_left(node)
        assert len(node.journal("in_process_restart")) == 2 and not node.journal("fault"), node.tail()
        assert len(node.journal("in_process_fault")) == (node is second)


@pytest.mark.slow
def test_a_node_without_ranks_ends_the_cycle_of_both(start_job: StartJob) -> None:
    nodes = first, second = pair(start_job, "--max-restarts=1")
    for rank in second.journal("cycle_start")[0]["ranks"]:
        os.kill(rank["pid"], signal.SIGKILL)
    holding(first, "1-0", range(4))
    say(first, "1-0", "go")
    assert [node.finish() for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for node in nodes:
        nothing_left(node)
        assert len(node.journal("taken_over")) == (node is second), node.tail()
    assert second.journal("fault")[0]["kind"] == "signal"
