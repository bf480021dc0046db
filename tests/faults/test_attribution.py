"""Who is blamed, of what, and what the user sees first, by real jobs: one rank fails, and its gloo peers lose it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.training import Plan

LOST = "Connection closed by peer"

GLOO = """
import os, sys, time
import torch, torch.distributed as dist

def load(step):
    if step == 3 and rank == world - 1 and cycle < 2:
        raise ValueError(f"bad sample in cycle {cycle}")
    return torch.ones(1)

def train():
    for step in range(6):
        samples.append(load(step))
        dist.all_reduce(samples[-1])

cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
samples = []  # torch 2.6 may hang at a group's end where a thread of gloo lets go of the last reference to a tensor
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
try:
    train()
finally:
    if cycle != 0:  # the others lose this rank, say so and end before it has said why
        dist.destroy_process_group()
        time.sleep(rank == world - 1)
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    return file


def faults(job: Job) -> list[dict[str, Any]]:
    return job.journal("fault")


@pytest.mark.parametrize("nproc", [2, 4])
def test_the_failed_ranks_own_error_is_what_the_user_sees(start_job: StartJob, tmp_path: Path, nproc: int) -> None:
    job = start_job(Plan(), nproc, "--max-restarts=2", script=script(tmp_path, GLOO))
    assert job.finish(120) == 0, job.tail()
    last = nproc - 1
    told = [(fault["cycle"], fault["rank"], fault["kind"], fault["fault_class"]) for fault in faults(job)]
    assert told == [(0, last, "exception", "user error"), (1, last, "exception", "user error")], job.tail()
    for cycle in (0, 1):
        (block,) = [part for part in job.output.split("ft_launcher: rank ")[1:] if f"  cycle {cycle}, pid" in part]
        head, about, frame, source, words = block.splitlines()[:5]
        assert head.startswith(f"{last} on ") and head.endswith(f"raised ValueError: bad sample in cycle {cycle}")
        assert about.endswith("; class: user error")
        assert "train.py" in frame and frame.endswith("in load") and "raise ValueError" in source
        assert words.strip() == f"| ValueError: bad sample in cycle {cycle}"
        assert "next: restart" in block and LOST not in block.partition("record:")[0]
    first = job.output.partition("  cycle 0, pid")[0]
    assert "ValueError: bad sample in cycle 0" in first.partition(LOST)[0], job.tail()


OUTSIDE = """
import os, signal, sys
cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if cycle == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
if cycle == 1:
    raise OSError(28, "No space left on device", "/data/x")
"""


def test_a_rank_told_to_end_from_outside_is_not_charged(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(Plan(), 1, "--max-restarts=1", script=script(tmp_path, OUTSIDE))
    assert job.finish() == 0, job.tail()
    assert [fault["fault_class"] for fault in faults(job)] == ["preemption", "infrastructure"], job.tail()
    assert [decision["charged"] for decision in job.journal("decision")] == [False, True]


PRINTS_ITSELF = """
import os, sys, traceback
import click

@click.command()
def with_click():
    raise click.ClickException("no such data set")

def like_hydra():
    try:
        raise MemoryError("no room for 4 GiB")
    except Exception:
        traceback.print_exc()
        sys.exit(1)

def in_words():
    sys.exit("nothing to do")

def without_a_way_out():
    try:
        raise ValueError("bad sample")
    except ValueError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(7)

def with_arguments():
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    parser.parse_args(["--rate", "fast"])

del sys.argv[1:]
programs = [with_click, like_hydra, in_words, without_a_way_out, with_arguments, lambda: sys.exit(5)]
programs[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]()
"""


def test_what_a_program_says_before_it_exits_is_its_error(start_job: StartJob, tmp_path: Path) -> None:
    flags = ("--max-restarts=5", "--redirects=2", f"--log-dir={tmp_path / 'logs'}")
    job = start_job(Plan(), 1, *flags, script=script(tmp_path, PRINTS_ITSELF))
    assert job.finish(120) == 5, job.tail()
    told = [(fault["kind"], fault["fault_class"], fault["what"]) for fault in faults(job)]
    assert told == [
        ("exception", "user error", "raised Error: no such data set"),
        ("exception", "memory", "raised MemoryError: no room for 4 GiB"),
        ("exception", "user error", "raised SystemExit: nothing to do"),
        ("exception", "user error", "raised ValueError: bad sample, and exited with code 7"),
        ("exception", "user error", "raised argparse.ArgumentError: argument --rate: invalid float value: 'fast', "
         "and exited with code 2"),
        ("exit", "unknown", "exited with code 5"),
    ], job.tail()  # fmt: skip
    assert [fault["error"].partition(" at ")[2].rpartition("/")[2] for fault in faults(job)[1:4]] == [
        "train.py:12",
        "train.py:18",
        "train.py:22",
    ]


TELLS_THE_CONSOLE = """
import logging, os, sys
import click

@click.command()
def with_click():
    raise click.ClickException("no such data set")

def with_many_words():
    logging.error("x" * 20_000)
    try:
        raise KeyError("lr")
    except KeyError:
        logging.exception("it failed")
    sys.exit(1)

del sys.argv[1:]
[with_click, with_many_words, lambda: sys.exit(5)][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]()
"""


@pytest.mark.parametrize("start", ["auto", "off"])
def test_what_a_program_says_on_the_console_is_its_error(start_job: StartJob, tmp_path: Path, start: str) -> None:
    """It exits with a code and nothing else; what it printed went through to a console that keeps nothing."""
    flags = ("--max-restarts=2", f"--ft-warm-start={start}")
    job = start_job(Plan(), 1, *flags, script=script(tmp_path, TELLS_THE_CONSOLE))
    assert job.finish(120) == 5, job.tail()
    assert [(fault["fault_class"], fault["what"]) for fault in faults(job)] == [
        ("user error", "raised Error: no such data set"),
        ("user error", "raised KeyError: 'lr'"),
        ("unknown", "exited with code 5"),
    ], job.tail()


AGAIN = """
import sys, traceback
import ft_client

ft_client.init()
ft_client.report_iteration(3)
try:
    raise KeyError("lr")
except KeyError:
    traceback.print_exc()
    sys.exit(1)
"""


def test_the_same_error_ends_the_job_also_where_the_program_handles_it(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(Plan(), 1, "--max-restarts=9", "--ft-same-error-limit=2", script=script(tmp_path, AGAIN))
    assert job.finish(120) == 93, job.tail()
    (*_, decision) = job.journal("decision")
    assert decision["reason"].startswith("the same error 2 times in a row: KeyError at ")


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise MemoryError("no room")

main()
"""


def test_without_our_python_torchs_error_file_tells(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(Plan(), 1, "--no-python", script=script(tmp_path, RECORDED))
    assert job.finish() == 1, job.tail()
    (fault,) = faults(job)
    assert (fault["kind"], fault["fault_class"], fault["what"]) == (
        "exception",
        "memory",
        "raised MemoryError: no room",
    )
