"""Restarts look up no names: with no resolver and an empty /etc/hosts, and with a resolver that never answers."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch

from tests.nodes import deaf_resolver
from tests.nodes.conftest import require
from tests.nodes.netns import unavailable
from tests.program import clean_environment, output_of
from tests.program import run as run_program

LIMIT_S = 120
GROUP = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open(f"rank{rank}.{cycle}", "w").write(f"{total.item():g}")
if cycle == "0" and rank == "1":
    while not os.path.exists("rank0.0"):  # else rank 0 may be ended before it has written that
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
# torch's own client of the store is in the group: ranks without one show what the launcher asks.
LONE = """
import os, shutil, sys, time
cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if os.path.exists("queries"):
    shutil.copy("queries", f"queries{rank}.{cycle}")
open(f"rank{rank}.{cycle}", "w").write("2")
if cycle == "0" and rank == "1":
    while not os.path.exists("rank0.0"):  # else the launcher may end rank 0 before it has looked
        time.sleep(0.05)
    sys.exit(1)
"""
WRAPPED = """
import os
import torch, torch.distributed as dist
from ft_client.inprocess import CallWrapper, Wrapper

@Wrapper()
def train(call_wrapper: CallWrapper = None):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank, iteration = dist.get_rank(), call_wrapper.iteration
    open(f"rank{rank}.{iteration}", "w").write(f"{total.item():g}")
    if iteration == 0 and rank == 1:
        raise RuntimeError("on purpose")
    dist.barrier()
    dist.destroy_process_group()

train()
"""
LOCAL = f"127.0.0.1 localhost {socket.gethostname()}\n"
"""Gloo looks up the name of the host itself: /etc/hosts has that, as on most hosts."""
BOTH = '"$@" & "$@"; code=$?; wait; exit $code'
LAUNCH = (sys.executable, "-m", "ft_launcher", "--max-restarts=1")
TRAINED = {f"rank{rank}.{number}": "2" for rank in (0, 1) for number in (0, 1)}
remembers_failures = pytest.mark.skipif(torch.__version__ < "2.9", reason="older releases of torch look up each peer")


def run(folder: Path, script: str, queries: str, hosts: str, *words: str) -> list[str]:
    """Runs a script in a namespace with a resolver of its own; returns the names that were looked up."""
    require(unavailable())
    (folder / "train.py").write_text(script)
    within = ["unshare", "--net", "--mount", sys.executable, str(deaf_resolver.__file__), queries, hosts]
    output_of([*within, *words, "train.py"], folder, LIMIT_S)
    assert {file.name: file.read_text() for file in folder.glob("rank*")} == TRAINED
    return read(folder / "queries")


def read(file: Path) -> list[str]:
    if not file.exists():
        return []
    return file.read_text().split()


@pytest.mark.parametrize("words", [(), ("--standalone",), ("--master-addr=localhost",)], ids=str)
def test_one_node_needs_no_name_at_all(tmp_path: Path, words: tuple[str, ...]) -> None:
    run(tmp_path, GROUP, deaf_resolver.NOBODY, "", *LAUNCH, "--nproc-per-node=2", *words)


@remembers_failures
def test_forks_look_up_no_peer_where_a_resolver_never_answers(tmp_path: Path) -> None:
    words = ("--nproc-per-node=2", "--ft-warm-start=on")
    assert run(tmp_path, GROUP, "queries", LOCAL, *LAUNCH, *words) == []


@remembers_failures
def test_the_launcher_looks_up_nothing_where_a_resolver_never_answers(tmp_path: Path) -> None:
    """The host's own name is not in /etc/hosts: torch's agent wants it for its events."""
    words = ("--nproc-per-node=2", "--ft-warm-start=off")
    assert run(tmp_path, LONE, "queries", "127.0.0.1 localhost\n", *LAUNCH, *words) == []


@remembers_failures
@pytest.mark.parametrize("start", ["on", "off"])
def test_a_restart_in_process_looks_up_no_peer(tmp_path: Path, start: str) -> None:
    words = ("--nproc-per-node=2", f"--ft-warm-start={start}")
    assert run(tmp_path, WRAPPED, "queries", LOCAL, *LAUNCH, *words) == []


@remembers_failures
def test_nodes_look_up_a_name_once(tmp_path: Path) -> None:
    """Not for the store of each cycle: what had been asked in the first cycle is all that was asked in the second."""
    name = deaf_resolver.KNOWN
    words = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={name}:29555", f"--local-addr={name}")
    asked = run(tmp_path, LONE, "queries", LOCAL, "sh", "-c", BOTH, "sh", *LAUNCH, *words)
    assert set(asked) == {name}
    assert [read(tmp_path / f"queries{rank}.1") for rank in (0, 1)] == [read(tmp_path / "queries0.0")] * 2


# Gloo looks up the host's own name. torch's flight recorder has nothing to do with that.
LIMITED = """
import os, signal
from datetime import timedelta
import torch, torch.distributed as dist
import ft_client as ft
from ft_client.inprocess import Wrapper

def train():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
    with open("calls", "a") as calls:
        calls.write(f"{rank}.{cycle}\\n")
    dist.destroy_process_group()

if HOW == "wrapped":
    Wrapper(soft_timeout=timedelta(seconds=1.5), hard_timeout=timedelta(seconds=2))(train)()
else:
    ft.init()
    with ft.section("setup"):
        train()
"""


@pytest.mark.parametrize("how", ["wrapped", "section"])
def test_a_limit_waits_for_a_resolver(tmp_path: Path, how: str) -> None:
    """A look-up takes 3 s here, and no restart follows from it: neither of the rank nor in process."""
    require(unavailable())
    (tmp_path / "train.py").write_text(LIMITED.replace("HOW", repr(how)))
    within = ("unshare", "--net", "--mount", sys.executable, deaf_resolver.__file__, "queries", "127.0.0.1 localhost")
    words = ("--nproc-per-node=2", "--ft-rank-section-timeouts=setup:1", "train.py")
    environ = clean_environment(OMP_NUM_THREADS="1")
    bounded = ("env", "RES_OPTIONS=timeout:3 attempts:1")
    done = run_program(
        [*within, *bounded, *LAUNCH, *words], folder=tmp_path, limit_s=LIMIT_S, environ=environ, check=True
    )
    assert set(read(tmp_path / "queries")) >= {socket.gethostname()}
    assert sorted(read(tmp_path / "calls")) == ["0.0", "1.0"], done.stderr
    assert "waits for a resolver" in done.stderr


FORKS = """
import os, sys
import torch
pipes = {end: os.fstat(end).st_ino for _ in range(8) for end in os.pipe()}
child = os.fork()
if child == 0:
    os._exit(sum(os.fstat(end).st_ino == number for end, number in pipes.items()))
print("descriptors in a child:", os.waitpid(child, 0)[1] >> 8)
"""


def test_the_store_that_ends_look_ups_costs_children_of_ranks_no_descriptors(tmp_path: Path) -> None:
    """libuv, by which torch's stores work, closes its own in each fork; those of a rank have other owners by then."""
    (tmp_path / "train.py").write_text(FORKS)
    shown = output_of([*LAUNCH, "--ft-warm-start=on", "train.py"], tmp_path, LIMIT_S)
    assert "descriptors in a child: 16\n" in shown
