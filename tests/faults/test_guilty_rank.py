"""Hangs in which most ranks wait in collectives of torch: the one that they wait for is named, never another."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.test_status import command, get, job_id
from tests.faults.training import Plan
from tests.ports import free_port

WORKER = Path(__file__).with_name("hang_worker.py")
RANKS = 4
LIMIT_S = 8  # a step takes milliseconds; on a busy machine its first one makes connections for seconds
HAS_RECORDER = hasattr(torch.distributed.distributed_c10d, "_dump_fr_trace_json") or hasattr(
    torch._C._distributed_c10d, "_dump_fr_trace_json"
)

pytestmark = pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder that answers in JSON")


def hang(start_job: StartJob, folder: Path, kind: str, rank: int, *flags: str) -> Job:
    """Runs the job until it has ended for the hang, and returns it."""
    (folder / "hang").write_text(f"{kind}:{rank}")
    limits = (f"--ft-rank-section-timeouts=step:{LIMIT_S}", "--max-restarts=0", *flags)
    job = start_job(Plan(), RANKS, *limits, script=WORKER)
    assert job.finish(180) != 0, job.tail()
    return job


@pytest.mark.parametrize(
    ("kind", "rank", "finding", "what"),
    [
        ("sleeps", 0, "behind", "never entered all_reduce 4 of group [dt]p0,"),
        ("sleeps", 3, "behind", "never entered all_reduce 4 of group [dt]p[01],"),
        ("spins", 1, "behind", "never entered all_reduce 4 of group [dt]p[01],"),
        ("livelock", 1, "behind", "never entered all_reduce 4 of group [dt]p[01],"),
        ("holds the GIL", 2, "behind", "never entered all_reduce 4 of group [dt]p0,"),
        (
            "waits for a lock",
            1,
            "behind",
            "never entered all_reduce 4 of group [dt]p[01],.*waits for a lock of its own",
        ),
        ("stops", 1, "gone", "is stopped"),
    ],
)
def test_the_rank_that_does_not_come(
    start_job: StartJob, tmp_path: Path, kind: str, rank: int, finding: str, what: str
) -> None:
    job = hang(start_job, tmp_path, kind, rank)
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["kind"], fault["finding"]) == (rank, "hang", finding), job.tail()
    assert re.search(what, fault["what"] + fault["hint"]), job.tail()
    (scene,) = job.journal("stacks")
    groups = {seen["rank"]: seen["groups"] for seen in scene["ranks"]}
    others = [number for number in range(RANKS) if number != rank]
    assert all(groups[number] for number in others), scene
    assert re.search(rf"rank {rank} on \S+ hangs: ", job.output), job.tail()


@pytest.mark.parametrize("rank", [0, 1])
def test_sends_and_receives_are_no_collectives(start_job: StartJob, tmp_path: Path, rank: int) -> None:
    """Ranks make unequally many of them; gloo counts them, rank 0's most."""
    (tmp_path / "hang").write_text(str(rank))
    limits = (f"--ft-rank-section-timeouts=step:{LIMIT_S}", "--max-restarts=0")
    job = start_job(Plan(), 3, *limits, script=WORKER.with_name("uneven_worker.py"))
    assert job.finish(180) != 0, job.tail()
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["finding"], fault["waiting"]) == (rank, "behind", 2), job.tail()
    what = r"it never entered all_reduce \d+ of group default_pg, and 2 ranks wait for it"
    assert re.search(what, fault["what"]), job.tail()


def test_a_rank_that_returns_while_others_need_it(start_job: StartJob) -> None:
    job = start_job(Plan(), RANKS, "--max-restarts=0", script=WORKER.with_name("returning_worker.py"))
    assert job.finish(180) == 1, job.tail()
    (fault,) = job.journal("fault")
    assert (fault["kind"], fault["finding"], fault["blamed"]) == ("exception", "returned", [RANKS - 1]), job.tail()
    assert f"rank {RANKS - 1} had returned from its program, while others still needed it" in job.output, job.tail()
    (evidence,) = job.journal("evidence")
    assert [rank["rank"] for rank in evidence["ranks"] if "returned_at" in rank] == [RANKS - 1], job.tail()


def test_another_collective_in_a_pair_names_both_sides(start_job: StartJob, tmp_path: Path) -> None:
    job = hang(start_job, tmp_path, "another collective", 1)
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["finding"]) in ((1, "mismatch"), (3, "mismatch")), job.tail()
    what = r"it is in collective 4 of group dp1, in which the ranks differ: .*broadcast of .*\(rank 1\)"
    assert re.search(what, fault["what"]), job.tail()


def test_another_size_in_a_pair_names_both_sides(start_job: StartJob, tmp_path: Path) -> None:
    """Gloo lets the rank that passed less go on, and the other one waits."""
    job = hang(start_job, tmp_path, "another size", 1)
    (fault,) = job.journal("fault")
    assert (fault["finding"], fault["blamed"]) == ("mismatch", [1, 3]), job.tail()
    assert re.search(r"in collective 4 of group dp1, in which the ranks differ: .*\[\[2\]\].*\(rank 1\)", fault["what"])


def test_a_rank_that_is_slow_is_no_fault(start_job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "hang").write_text("is slow:2:mesh")
    job = start_job(Plan(), RANKS, f"--ft-rank-section-timeouts=step:{LIMIT_S}", script=WORKER)
    assert job.finish(180) == 0, job.tail()
    assert not job.journal("fault"), job.tail()


def test_without_the_recorder_stacks_decide(start_job: StartJob, tmp_path: Path) -> None:
    job = hang(start_job, tmp_path, "sleeps", 2, "--ft-flight-recorder=off")
    (fault,) = job.journal("fault")
    # On a busy machine a peer may lose its connections before its own limit: then it has no place by which to compare.
    findings = {"behind", ""} if job.journal("uncaught_exception") else {"behind"}
    assert fault["rank"] == 2 and fault["finding"] in findings, job.tail()
    (scene,) = job.journal("stacks")
    assert not any(seen["groups"] for seen in scene["ranks"])


def test_the_collectives_can_be_asked_for_while_ranks_run(start_job: StartJob, tmp_path: Path) -> None:
    """Before any limit is exceeded: how far each rank is in each group."""
    (tmp_path / "hang").write_text("sleeps:2")
    port = free_port()
    job = start_job(Plan(), RANKS, f"--ft-status-port={port}", script=WORKER)
    job.until(lambda: job.journal("cycle_start"), "the ranks to start")

    def waits_for_it() -> bool:
        found: dict[str, Any] = json.loads(get(port, "/status.json?collectives=1")[1])
        rows = (found["collectives"] or {}).get("rows", [])
        places = [(row["ranks"], row["entered"], row["finished"]) for row in rows if row["group"] == "dp0"]
        return places == [([2], 3, 3), ([0], 4, 3)]

    job.until(waits_for_it, "rank 0 to wait for rank 2 in its fourth step", 60)
    done = command(job, "stacks", job_id(job))
    assert "  dp0: rank 2 finished all_reduce 3\n  dp0: rank 0 in all_reduce 4 of [[4]] ['Float']\n" in done.stdout
    shown = json.loads(get(port, "/status.json")[1])["collectives"]
    assert shown is not None and shown["age_s"] >= 0.0  # what was known when somebody last asked
    job.process.send_signal(signal.SIGINT)
    job.finish()
