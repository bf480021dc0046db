"""Trainings that know nothing of us and hang (`--ft-hang-timeout`), and those that only seem to: real jobs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.test_attribution import script
from tests.faults.test_two_nodes import global_ranks
from tests.faults.training import Plan
from tests.patience import patient
from tests.ports import free_port
from tests.program import suspend

LIMIT_S = 3.0
LIMITED = (f"--ft-hang-timeout={LIMIT_S:g}", "--max-restarts=1")

HANGS = """
import os, re, signal, time
import torch, torch.distributed as dist

def load():
    if HOW == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while HOW == "spins":
        pass
    if HOW == "holds the GIL":
        re.match("(a+)+$", "a" * 60 + "b")  # for ever, and no other thread of the rank runs
    time.sleep(600)

dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(4))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and (dist.get_rank() == 1 or HOW == "all sleep"):
    load()
dist.barrier()
"""


def hangs(folder: Path, how: str) -> Path:
    return script(folder, HANGS.replace("HOW", repr(how)))


def verdict_on(job: Job, rank: int) -> str:
    """The reason of the one verdict, which must be about that rank and end it."""
    (verdict,) = job.journal("verdict")
    found = verdict["rank"], verdict["limit"], verdict["limit_s"], verdict["condemned"]
    assert found == (rank, "hang", LIMIT_S, True), job.tail()
    return str(verdict["reason"])


@pytest.mark.parametrize(("how", "warm"), [("sleeps", "auto"), ("spins", "off"), ("stops", "auto")])
def test_the_rank_that_does_not_come_is_ended_and_the_job_restarts(
    start_job: StartJob, tmp_path: Path, how: str, warm: str
) -> None:
    job = start_job(Plan(), 3, *LIMITED, f"--ft-warm-start={warm}", script=hangs(tmp_path, how))
    assert job.finish(120) == 0, job.tail()
    assert verdict_on(job, 1).startswith(
        "it is stopped (SIGSTOP or a debugger), and 2 ranks wait for it in a collective for "
        if how == "stops"
        else "2 ranks wait for it in a collective for "
    ), job.tail()
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["kind"], fault["fault_class"], fault["limit"]) == (1, "hang", "hang", "hang")
    finding = "behind"
    if how == "stops":
        finding = "gone"
        assert fault["what"].startswith("hangs: it is stopped"), job.tail()
    assert (fault["finding"], fault["blamed"], fault["waiting"]) == (finding, [1], 2), job.tail()
    if how != "stops":
        assert "in load" in fault["detail"][0], job.tail()
    # Those that lost the rank may have been ended before they had printed their errors.
    if "Connection closed by peer" in job.output:
        assert "failed in consequence" in fault["others"][0], job.tail()
    assert [line["cycle"] for line in job.journal("cycle_start")] == [0, 1], job.tail()


def test_a_rank_that_holds_the_gil_and_computes_is_ended_without_a_flight_recorder(
    start_job: StartJob, tmp_path: Path
) -> None:
    """Its monitor gets no stack of it before the verdict: a rank that is not ended gets no signal while it computes.

    Without a recorder the reported iteration shows that the training has begun.
    """
    begun = "import ft_client\nft_client.init()\nft_client.report_iteration(3)\n"
    training = script(tmp_path, begun + HANGS.replace("HOW", repr("holds the GIL")))
    job = start_job(Plan(), 3, *LIMITED, "--ft-flight-recorder=off", script=training)
    assert job.finish(120) == 0, job.tail()
    assert verdict_on(job, 1).startswith("2 ranks wait for it in a collective for "), job.tail()
    (fault,) = job.journal("fault")
    assert [fault[name] for name in ("rank", "finding", "blamed", "waiting")] == [1, "behind", [1], 2], job.tail()
    assert "in load" in fault["detail"][1], job.tail()
    assert [line["cycle"] for line in job.journal("cycle_start")] == [0, 1], job.tail()


ALL_CALL = """
import os
import torch, torch.distributed as dist
from ft_client.rank.agreement import roll_call

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
spins = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1
while spins:
    pass
roll_call.await_all("load()")
"""


def test_ranks_that_wait_until_all_have_made_a_call_wait_as_in_a_collective(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = start_job(Plan(), 3, *LIMITED, script=script(tmp_path, ALL_CALL))
    assert job.finish(120) == 0, job.tail()
    assert verdict_on(job, 1).startswith("2 ranks wait for it in a collective for "), job.tail()
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["finding"], fault["blamed"], fault["waiting"]) == (1, "behind", [1], 2), job.tail()


LOSES = """
import os, signal, time
import torch, torch.distributed as dist

def load():
    if HOW == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)

def leave():
    if dist.get_rank() == 2:
        os._exit(0)  # nothing tells why
    time.sleep(600)

dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, lambda number, frame: dist.destroy_process_group())
for step in range(3):
    dist.all_reduce(torch.ones(4))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    load()
try:
    dist.barrier()
except RuntimeError:
    leave()
"""


@pytest.mark.parametrize(("how", "finding"), [("sleeps", "behind"), ("stops", "gone")])
def test_what_the_others_do_once_they_lost_the_rank_is_no_evidence(
    start_job: StartJob, tmp_path: Path, how: str, finding: str
) -> None:
    """The rank that is ended closes its connections, and lives on until SIGKILL: one rank that waited for it ends, the
    other leaves the collective."""
    # Longer than answers of ranks are used again (0.5 s).
    ending = ("--ft-rank-termination-signal=SIGTERM", "--ft-termination-grace-time=1.5", "--workers-stop-timeout=1")
    job = start_job(Plan(), 3, *LIMITED, *ending, script=script(tmp_path, LOSES.replace("HOW", repr(how))))
    assert job.finish(120) == 0, job.tail()
    (fault,) = job.journal("fault")
    named = [fault[name] for name in ("rank", "limit", "finding", "blamed", "waiting")]
    assert named == [1, "hang", finding, [1], 2], job.tail()
    assert all("in barrier" in line for line in fault["others"]), job.tail()
    assert fault["what"].count("it is stopped") == (how == "stops"), job.tail()


def test_where_nobody_waits_a_rank_that_does_nothing_is_ended(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(Plan(), 2, *LIMITED, script=hangs(tmp_path, "all sleep"))
    assert job.finish(120) == 0, job.tail()
    (verdict,) = job.journal("verdict")
    assert verdict_on(job, verdict["rank"]).startswith("its main thread runs no Python, and it uses no CPU time")
    assert [fault["rank"] for fault in job.journal("fault")] == [verdict["rank"]], job.tail()


def test_two_nodes_restart_for_the_rank_of_one_of_them(start_job: StartJob, tmp_path: Path) -> None:
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-node-beat=0.5"),
    )
    training = hangs(tmp_path, "spins")
    nodes = [start_job(Plan(), 1, *LIMITED, *flags, name=name, script=training) for name in ("first", "second")]
    assert [node.finish(120) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    waits, spins = sorted(nodes, key=lambda node: min(global_ranks(node)))
    assert verdict_on(waits, 0).startswith("it waits in a collective for rank 1 for "), waits.tail()
    assert (waits.journal("fault"), spins.journal("verdict")) == ([], []), spins.tail()
    (fault,) = spins.journal("fault")
    assert (fault["rank"], fault["kind"], fault["finding"]) == (1, "hang", "behind"), spins.tail()
    for node in nodes:
        assert [line["cycle"] for line in node.journal("cycle_start")] == [0, 1], node.tail()


def test_what_ranks_of_another_node_do_once_they_lost_the_rank_is_no_evidence(
    start_job: StartJob, tmp_path: Path
) -> None:
    """The node whose rank is ended decides, and the other one says where its ranks were at that moment."""
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-node-beat=0.5"),
        *("--ft-rank-termination-signal=SIGTERM", "--ft-termination-grace-time=1.5", "--workers-stop-timeout=1"),
    )
    training = script(tmp_path, LOSES.replace("HOW", repr("sleeps")))
    nodes = [start_job(Plan(), 2, *LIMITED, *flags, name=name, script=training) for name in ("first", "second")]
    assert [node.finish(120) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    hangs, waits = sorted(nodes, key=lambda node: min(global_ranks(node)))
    (fault,) = hangs.journal("fault")
    named = [fault[name] for name in ("rank", "limit", "finding", "blamed", "waiting")]
    assert named == [1, "hang", "behind", [1], 3], hangs.tail()
    assert waits.journal("fault") == [], waits.tail()


SLOW_LIMIT_S = patient(LIMIT_S)
"""On a busy machine the compiler of one rank starts seconds after that of another, which is no hang."""
PATIENT = f"""
import os, pdb, subprocess, sys, threading, time
import torch, torch.distributed as dist
import ft_client as ft

LONG_S = {2 * SLOW_LIMIT_S}
BUSY = f"import time; end = time.monotonic() + {{LONG_S}}\\nwhile time.monotonic() < end: pass"

def debug():
    read, write = os.pipe()
    def go_on():
        time.sleep(LONG_S)
        os.write(write, b"continue\\n")
    threading.Thread(target=go_on).start()
    debugger = pdb.Pdb(stdin=os.fdopen(read), stdout=sys.stdout)
    debugger.use_rawinput = False
    debugger.set_trace()

dist.init_process_group("gloo")
first = dist.get_rank() == 0
ft.init()
if first:  # a download and a tokenizer, before the first collective
    time.sleep(LONG_S)
dist.barrier()
for step in range(4):  # an evaluation on one rank, each time below the limit
    if first:
        time.sleep({SLOW_LIMIT_S / 2})
    dist.barrier()
subprocess.run([sys.executable, "-c", BUSY])  # a compiler
dist.barrier()
thread = threading.Thread(target=exec, args=(BUSY,))  # threads of a library, for which the main thread waits
thread.start()
thread.join()
dist.barrier()
if first:
    with ft.section("checkpointing"):
        time.sleep(LONG_S)
dist.barrier()
if first:
    debug()
dist.barrier()
"""


def test_what_takes_long_and_is_no_hang(start_job: StartJob, tmp_path: Path) -> None:
    flags = (f"--ft-hang-timeout={SLOW_LIMIT_S:g}", "--max-restarts=1", "--ft-rank-section-timeouts=checkpointing:100")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, PATIENT))
    assert job.finish(180) == 0, job.tail()
    assert job.journal("verdict", "fault") == [], job.tail()
    assert "(Pdb)" in job.output, job.tail()


STEPS = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo")
go, done = Path(sys.argv[1], "go"), torch.zeros(1)
while not done.item():
    done.fill_(go.exists())
    dist.all_reduce(done)
    Path(sys.argv[1], f"trains-{dist.get_rank()}").touch()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("whole", [True, False], ids=["the whole job", "all ranks"])
def test_a_job_that_is_stopped_and_continued(start_job: StartJob, tmp_path: Path, whole: bool) -> None:
    job = start_job(Plan(), 2, *LIMITED, script=script(tmp_path, STEPS))

    def have_stepped_since(moment: float) -> bool:
        """Whether both ranks made a step after this moment of the wall clock, which files have."""
        steps = [file.stat().st_mtime for file in job.folder.glob("trains-*")]
        return len(steps) == 2 and min(steps) > moment

    job.until(lambda: have_stepped_since(0.0), "the steps")
    (start,) = job.journal("cycle_start")
    ranks = [rank["pid"] for rank in start["ranks"]]
    pids = list(job.processes()) if whole else ranks
    suspend(sorted(pids, key=lambda pid: pid not in ranks), 2 * LIMIT_S)
    continued = time.time()
    job.until(lambda: have_stepped_since(continued + LIMIT_S), "steps past each limit that began before they went on")
    job.go()
    assert job.finish() == 0, job.tail()
    assert job.journal("verdict", "fault") == [], job.tail()
