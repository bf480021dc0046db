"""FT_AS_TORCHRUN: programs that call torch's launcher get this one, and a killed rank costs them a restart."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rank_monitor.contract import env
from tests.program import ROOT, clean_environment, run

HOOK = {env.AS_TORCHRUN: "1"}
SCRIPTS = Path(sysconfig.get_path("scripts"))
PTH = ROOT / "client" / "ft_as_torchrun.pth"
IN_PLACE = "ft_launcher runs in the place of torchrun"
TO_TORCH = "torch's own launcher is used"
OPTIONS = ("--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")

TRAINS = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
by = "ft_launcher" if "FT_JOB_TAG" in os.environ else "torch"
os.write(1, f"cycle {cycle} rank {rank} of {total.item():.0f} by {by} {sys.argv[1:]}\\n".encode())
dist.barrier()  # both have written
if (cycle, rank) == ("0", "1"):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""

SAYS_WHOSE = "import os; os.write(1, f\"{'FT_JOB_TAG' in os.environ}\\n\".encode())"
"""In one piece: `print` writes the end of the line apart, and another rank's text may come in between."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINS)
    return tmp_path


def program(place: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = clean_environment(TMPDIR=str(place), **variables)
    return run([str(word) for word in words], folder=place, limit_s=120, environ=environ)


def recovered(done: subprocess.CompletedProcess[str], *arguments: str) -> None:
    """Both ranks ran in two cycles, under our launcher."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("cycle ")]
    ranks = [f"cycle {cycle} rank {rank} of 2 by ft_launcher {[*arguments]}" for cycle in (0, 1) for rank in (0, 1)]
    assert sorted(lines) == ranks, done.stderr
    assert "rank 1 on " in done.stderr and "died of SIGKILL" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        [SCRIPTS / "torchrun"],
        [sys.executable, "-m", "torch.distributed.run"],
        [sys.executable, "-m", "torch.distributed.launch"],
    ],
    ids=["torchrun", "run", "launch"],
)
def test_the_commands_of_torch(place: Path, command: list[str | Path]) -> None:
    done = program(place, *command, *OPTIONS, "train.py", "--lr", "0.1", **HOOK)
    recovered(done, "--lr", "0.1")
    assert done.stderr.count(IN_PLACE) == 1


@pytest.mark.parametrize("variables", [{}, {env.AS_TORCHRUN: "0"}, {env.AS_TORCHRUN: "perhaps"}], ids=str)
def test_without_a_clear_word_torch_launches(place: Path, variables: dict[str, str]) -> None:
    (place / "train.py").write_text(SAYS_WHOSE)
    done = program(place, SCRIPTS / "torchrun", *OPTIONS, "train.py", **variables)
    assert (done.returncode, done.stdout) == (0, "False\nFalse\n"), done.stderr
    assert ("neither true nor false" in done.stderr) == ("perhaps" in variables.values())


CALLS_MAIN = f"from torch.distributed.run import main\nmain([*{OPTIONS!r}, 'train.py'])\nprint('after it')"


def test_a_program_that_calls_torchs_main_goes_on_after_it(place: Path) -> None:
    done = program(place, sys.executable, "-c", CALLS_MAIN, **HOOK)
    recovered(done)
    assert done.stdout.endswith("after it\n")


FUNCTION = """
import json, os, signal, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def train(base):
    cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if FAILS or (cycle, rank) == ("0", "1"):
        raise ValueError("the batch is empty")
    return [base + int(rank), "FT_JOB_TAG" in os.environ]

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=1, HOW)
    try:
        print(json.dumps(elastic_launch(config, train)(10)))
    except Exception as error:
        first = error.get_first_failure()[1]
        print(json.dumps([type(error).__module__, type(error).__name__, first.message["message"]]))
"""


@pytest.mark.parametrize("start", ["", "start_method='fork'"])
def test_a_function_returns_its_values(place: Path, start: str) -> None:
    (place / "function.py").write_text(FUNCTION.replace("FAILS", "False").replace("HOW", start))
    done = program(place, sys.executable, "function.py", **HOOK)
    assert json.loads(done.stdout) == {"0": [10, True], "1": [11, True]}, done.stderr


def test_a_function_that_fails_raises_torchs_error_with_the_ranks_own(place: Path) -> None:
    (place / "function.py").write_text(FUNCTION.replace("FAILS", "True").replace("HOW", ""))
    done = program(place, sys.executable, "function.py", **HOOK)
    module, name, message = json.loads(done.stdout)
    assert (module, name) == ("torch.distributed.elastic.multiprocessing.errors", "ChildFailedError")
    assert "the batch is empty" in message


def test_what_this_launcher_cannot_take_goes_to_torch_with_a_line(place: Path) -> None:
    (place / "train.py").write_text(SAYS_WHOSE)
    done = program(place, sys.executable, "-c", CALLS_MAIN, FT_RANK_HEARTBEAT_TIMEOUT="soon", **HOOK)
    assert (done.returncode, done.stdout) == (0, "False\nFalse\nafter it\n"), done.stderr
    assert "rank_heartbeat_timeout='soon' (from FT_RANK_HEARTBEAT_TIMEOUT)" in done.stderr
    assert done.stderr.count(TO_TORCH) == 3, "for `main`, and for `run` and `launch_agent`, which it calls"


NESTED = """
import os
from torch.distributed.run import main
if os.environ["RANK"] == "0":
    main(["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "inner.py"])
"""


def test_a_launch_in_a_rank_is_torchs(place: Path) -> None:
    (place / "train.py").write_text(NESTED)
    (place / "inner.py").write_text("import os; print('inner', os.environ['WORLD_SIZE'])")
    done = program(place, SCRIPTS / "torchrun", *OPTIONS, "train.py", **HOOK)
    assert (done.returncode, done.stdout) == (0, "inner 1\n"), done.stderr
    assert f"{TO_TORCH}: this is a rank of a job" in done.stderr


def test_accelerate_launches_it(place: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed with this Python")
    options = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    done = program(place, SCRIPTS / "accelerate", "launch", *options, "--max_restarts=1", "train.py", **HOOK)
    recovered(done)
    assert TO_TORCH not in done.stderr


def test_fabric_launches_it(place: Path) -> None:
    (place / "train.py").write_text(SAYS_WHOSE)
    words = ("run", "--accelerator=cpu", "--devices=2", "--strategy=ddp", "train.py")
    done = program(place, SCRIPTS / "fabric", *words, **HOOK)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_the_line_of_the_pth_says_nothing_where_the_package_is_gone(tmp_path: Path) -> None:
    done = run([sys.executable, "-I", "-S", "-c", PTH.read_text()], folder=tmp_path, environ=HOOK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_interpreter_imports_neither_torch_nor_anything_slow_for_it(place: Path) -> None:
    code = (
        "import sys; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'typing', 'ft_launcher')])"
    )
    done = program(place, sys.executable, "-S", "-c", f"{PTH.read_text()}\n{code}", **HOOK)
    assert done.stdout == "['ft_launcher', 'ft_launcher.torchrun_hook']\n", done.stderr


def test_without_torch_the_import_fails_as_ever(place: Path) -> None:
    code = f"{PTH.read_text()}\nimport torch.distributed.run"
    done = program(place, sys.executable, "-S", "-c", code, **HOOK)
    assert "No module named 'torch'" in done.stderr
