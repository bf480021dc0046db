"""Hangs of scripts that know nothing of us: who is named, what is kept, and what is said of limits that cannot act."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.test_attribution import script
from tests.faults.training import Plan
from tests.patience import patient

SETUP = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def goodbye(number, frame):
    sys.exit(143)

def load():
    if HOW == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)

signal.signal(signal.SIGTERM, goodbye)
dist.init_process_group("gloo")
DistributedDataParallel(torch.nn.Linear(4, 4))  # the first one imports, for seconds on a busy machine
if dist.get_rank() == 1:
    load()
DistributedDataParallel(torch.nn.Linear(4, 4))
"""
"""Rank 0 waits in the constructor of DDP for rank 1."""


def stacks(job: Job, local_rank: int) -> str:
    (file,) = (job.folder / "logs").glob(f"*/cycle_0/{local_rank}/stacks.txt")
    return file.read_text()


@pytest.mark.parametrize("how", ["sleeps", "stops"])
def test_a_hang_in_setup_is_that_of_the_rank_which_does_not_come(start_job: StartJob, tmp_path: Path, how: str) -> None:
    """The stall comes first and only warns; the collective timeout ends the cycle."""
    flags = ("--ft-stall-warning=4", "--ft-nccl-collective-timeout=15", f"--log-dir={tmp_path / 'logs'}")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, SETUP.replace("HOW", repr(how))))
    assert job.finish(120) == 85, job.tail()
    named = "is stopped (SIGSTOP or a debugger)" if how == "stops" else "is in no call of torch.distributed"

    lines = [line for line in job.output.splitlines() if "--ft-stall-warning" in line]
    done, at = r"never entered \w+ \d+ of group \S+", r"; rank 1 is at train\.py:13 in load"
    if how == "stops":
        done, at = re.escape(named), ""
    who = rf"\d\d:\d\d:\d\d ft_launcher: rank 1 {done}, and 1 rank waits for it, for [0-9.]+ s{at}"
    warning = who + r"\. No rank is ended for that"
    assert len(lines) == 1 and re.match(warning, lines[0]), job.tail()
    assert "--ft-hang-timeout SECONDS would end a hang" in lines[0]

    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["kind"], fault["fault_class"]) == (1, "hang", "hang"), job.tail()
    head, *rest = job.output.partition("ft_launcher: rank 1 on ")[2].splitlines()
    assert " hangs: it is stopped" in head if how == "stops" else f" hangs: it {named}" in head
    assert any(re.search(r"^  also: rank 0: waited in a collective until that failed$", line) for line in rest[:10]), (
        job.tail()
    )
    assert how == "stops" or any("train.py:13 in load" in line for line in rest[:10]), job.tail()

    assert "_verify_param_shape_across_processes" in stacks(job, 0)
    (kept,) = job.journal("stacks")
    assert [rank["rank"] for rank in kept["ranks"]] == [0, 1]
    if how == "sleeps":
        assert "in load" in stacks(job, 1) and "goodbye" not in stacks(job, 1)
        assert kept["ranks"][1]["place"] == "outside"
    else:
        assert kept["ranks"][1]["place"] == "stopped"
    assert "a hang in NCCL" not in job.output, "the job uses gloo"


HALF_WATCHED = """
import sys, time
from pathlib import Path
import torch.distributed as dist
import ft_client

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    ft_client.init()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
"""


def test_limits_that_cannot_act_say_so_once(start_job: StartJob, tmp_path: Path) -> None:
    flags = ("--ft-rank-section-timeouts=step:60", "--ft-unwatched-warning=1", "--ft-nccl-collective-timeout=77")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, HALF_WATCHED))
    job.until(lambda: "cannot act" in job.output, "the warning")
    job.go()
    assert job.finish() == 0, job.tail()
    (line,) = [line for line in job.output.splitlines() if "cannot act" in line]
    for part in (
        "WARNING: --ft-rank-section-timeouts cannot act",
        "(rank 1)",
        "`import ft_client as ft; ft.init()`",
        "`for batch in ft.steps(loader):`",
        "--ft-stall-warning",
        "--ft-nccl-collective-timeout: 77 s",
    ):
        assert part in line
    assert len(job.journal("limits_cannot_act")) == 1
    assert "a hang in NCCL" not in job.output, "the job uses gloo, although an option of NCCL's is given"


OF_NCCL = """
import sys, time
from pathlib import Path
import torch.distributed.distributed_c10d as c10d

c10d.is_initialized, c10d.get_backend_config = lambda: True, lambda: "cpu:gloo,cuda:nccl"  # as with a GPU
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.05)
"""


def test_how_long_a_hang_in_nccl_lasts_is_said_where_nccl_is_used(start_job: StartJob, tmp_path: Path) -> None:
    flags = ("--max-restarts=2", "--ft-nccl-collective-timeout=77", "--ft-stall-warning=4")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, OF_NCCL))
    bound = "a hang in NCCL lasts at most 377 s (collective 77 s + heartbeat 300 s); with --max-restarts=2 1131 s"
    job.until(lambda: bound in job.output, "the bound")
    job.go()
    assert job.finish() == 0, job.tail()
    assert job.output.count(bound) == 1


WATCHED = """
import time
import ft_client as ft
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
DistributedDataParallel(torch.nn.Linear(4, 4))
ft.init()
dist.barrier()
with ft.section("setup"):
    if dist.get_rank() == 1:
        time.sleep(600)
    DistributedDataParallel(torch.nn.Linear(4, 4))
"""


def test_where_limits_act_the_rank_that_waits_in_setup_is_not_blamed(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(
        Plan(),
        2,
        f"--ft-rank-section-timeouts=setup:{patient(4)}",
        f"--log-dir={tmp_path / 'logs'}",
        script=script(tmp_path, WATCHED),
    )
    assert job.finish(120) == 85, job.tail()
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["limit"]) == (1, "section:setup"), job.tail()
    assert "train.py:14 in <module>" in fault["detail"][0]
    assert "_verify_param_shape" in stacks(job, 0), stacks(job, 0)
    assert "line 14 in <module>" in stacks(job, 1)
