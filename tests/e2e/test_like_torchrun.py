"""Scripts in the style of torch's examples see the same under torchrun and under ft_launcher, side by side."""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.run import get_args_parser

from tests import program
from tests.ft_launcher.conftest import needs
from tests.ports import free_port
from tests.program import ONE_TRY, clean_environment

LIMIT_S = 120
TEMPLATE = "--log-line-prefix-template"

SHOW = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
         "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONPATH"]
shown = " ".join(f"{name}={os.environ.get(name)}" for name in names)
os.write(1, f"{shown} {sys.argv[1:]} {__name__}\\n".encode())  # one write: lines of ranks must not mix
os.write(2, f"to stderr of {os.environ['RANK']}\\n".encode())
"""
DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.full((3, 4), float(dist.get_rank() + step))).square().mean()
    loss.backward()
    optimizer.step()
total = sum(parameter.sum() for parameter in model.parameters())
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.6f}\\n".encode())
dist.destroy_process_group()
# After gloo and autograd the interpreter's own end aborts in one of seven runs ("terminate called without an active
# exception", torch 2.13), under torchrun, too.
os._exit(0)
"""


@dataclass(frozen=True)
class Ran:
    """A job that ended."""

    exit_code: int
    stdout: list[str]
    stderr: str


def run(launcher: str, folder: Path, *words: str, shares_store: bool = True) -> Ran:
    environment = clean_environment(**ONE_TRY, TORCH_CPP_LOG_LEVEL="ERROR")
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0" if shares_store else "1"
    if launcher != "ft_launcher" and get_args_parser().get_default("master_port"):
        environment["PET_MASTER_PORT"] = str(free_port())  # torch 2.6 takes 29500 for each job of the machine
    done = program.run([sys.executable, "-m", launcher, *words], folder=folder, environ=environment, limit_s=LIMIT_S)
    return Ran(done.returncode, sorted(done.stdout.splitlines()), done.stderr)


def both(folder: Path, *words: str) -> tuple[Ran, Ran]:
    return run("torch.distributed.run", folder, *words), run("ft_launcher", folder, *words)


OWN_STORE = """
import os, sys, torch.distributed as dist
names = ["RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"]
rank, host, port, count, agents = (os.environ[name] for name in names)
store = dist.TCPStore(host, int(port), 2, rank == "0")
store.set(f"here {rank}", count)
store.wait(["here 0", "here 1"])
os.write(1, f"{rank} {count} {agents} {store.get('here 0')} {store.get('here 1')}\\n".encode())
if store.add("left", 1) == 2:
    store.set("all", "")
store.wait(["all"])
dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=int(rank), world_size=2)
dist.barrier()
if rank == "1" and count == "0":
    sys.exit(3)
if count == "0":
    dist.barrier()
else:
    dist.destroy_process_group()
"""
MASTER = "import os; os.write(1, os.environ['MASTER_ADDR'].encode() + b'\\n')"


def to_stderr(ran: Ran) -> list[str]:
    """What the ranks wrote there, without what launchers say."""
    return sorted(line for line in ran.stderr.splitlines() if "to stderr of" in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in (("show.py", SHOW), ("ddp.py", DDP), ("master.py", MASTER), ("store.py", OWN_STORE)):
        (tmp_path / name).write_text(textwrap.dedent(source))
    (tmp_path / "show.sh").write_text('#!/bin/sh\necho "sh $RANK of $WORLD_SIZE: $@"\n')
    (tmp_path / "show.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone", "--nproc_per_node", "2", "--max-restarts", "3", "--role", "worker", "show.py", "--lr", "-m"],
        ["--nproc-per-node=2", "--no-python", "./show.sh", "a", "b"],
        ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7", "show.py"],
        ["--nproc-per-node=2", "--tee", "0:1,1:2", "--log-dir", "logs", "-m", "show", "x"],
        ["--nproc-per-node=2", "--local-ranks-filter", "1", "--log-dir", "logs", "show.py"],
        ["--nproc-per-node=2", "--tee", "3", "--log-dir", "logs", TEMPLATE, "${hostname}:${rank}: ", "show.py"],
        ["--nproc-per-node=2", "ddp.py"],
        ["--run-path", "show.py", "x"],
        ["--standalone", "--local-addr=LocalHost", "master.py"],
        ["--nproc-per-node=2", "--tee=1", "--duplicate-stdout-filters=RANK=1", "--log-dir", "logs", "show.py"],
    ],
    ids=" ".join,
)
def test_the_ranks_see_and_print_the_same(folder: Path, words: list[str]) -> None:
    """And without a folder for logs nothing is left."""
    needs(*words)
    before = sorted(folder.iterdir())
    theirs, ours = both(folder, *words)
    assert theirs.exit_code == ours.exit_code == 0, ours.stderr
    assert ours.stdout == theirs.stdout
    assert to_stderr(ours) == to_stderr(theirs)
    assert sorted(folder.iterdir()) == before or "--log-dir" in words


def test_the_launcher_has_the_name_of_torchrun_in_lists_of_processes(folder: Path) -> None:
    (folder / "parent.py").write_text("import os; print(open(f'/proc/{os.getppid()}/comm').read().strip())")
    torchrun, ours = both(folder, "parent.py")
    assert ours.stdout == ["pt_elastic"]
    if "pt_elastic" in inspect.getsource(torch.distributed.run):  # not in each torch
        assert torchrun.stdout == ours.stdout


def test_rank_0_makes_the_store_where_it_is_not_shared(folder: Path) -> None:
    """TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: nobody listens at MASTER_PORT before rank 0 does, in each cycle."""
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "store.py")
    launchers = ("torch.distributed.run", "ft_launcher")
    theirs, ours = (run(launcher, folder, *words, shares_store=False) for launcher in launchers)
    assert theirs.exit_code == ours.exit_code == 0, ours.stderr
    assert ours.stdout == theirs.stdout == [f"{rank} {n} False b'{n}' b'{n}'" for rank in (0, 1) for n in (0, 1)]
    assert ours.stderr.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not needed here") == 1


def test_redirected_streams_lie_in_files(folder: Path) -> None:
    ours = run("ft_launcher", folder, "--nproc-per-node=2", "--redirects", "3", "--log-dir", "logs", "show.py")
    assert ours.exit_code == 0 and ours.stdout == []
    (run_folder,) = (folder / "logs").iterdir()
    for rank in ("0", "1"):
        assert f"RANK={rank} " in (run_folder / "cycle_0" / rank / "stdout.log").read_text()
        assert f"to stderr of {rank}" in (run_folder / "cycle_0" / rank / "stderr.log").read_text()
