"""Real jobs whose ranks find at their first import of torch that they should not have been forked."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import program
from tests.program import clean_environment

LIMIT_S = 100

SETTINGS = "import os\nos.environ['OMP_WAIT_POLICY'] = 'passive'\n"
# Each run of the script leaves one line: its pid, and whether torch was there already.
LINE = """
import os, sys
cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
with open(f"runs.{cycle}.{rank}", "a") as file:
    file.write(f"{os.getpid()} {'libtorch' in open('/proc/self/maps').read()} {sys.stdin.readline()!r}\\n")
"""
CRASHES = LINE + "import settings, torch\nsys.exit(3 if cycle == '0' and rank == '0' else 0)\n"
REFUSED = (
    LINE
    + """
import socket, subprocess
def high():
    with socket.socket() as low:
        return os.dup2(low.fileno(), 300)
held = [high, lambda: subprocess.Popen(["sleep", "60"]), lambda: os.dup2(1, 2)][int(rank)]()
import settings, torch
sys.stdout.write(f"it goes on {os.environ['OMP_WAIT_POLICY']}\\n")
if rank == "1":
    held.kill()
"""
)
FUNCTION = """
import json, os

def train(data):
    os.environ["KMP_X"] = os.environ["LOCAL_RANK"]
    with open(f"runs.0.{os.environ['RANK']}", "a") as file:
        file.write(f"{os.getpid()} {'libtorch' in open('/proc/self/maps').read()}\\n")
    import torch
    return len(data), torch.ones(2).sum().item()

if __name__ == "__main__":
    from ft_launcher import LaunchConfig, launch
    print(json.dumps(launch(train, LaunchConfig(nproc_per_node=2))(b"x" * 5_000_000)))
"""


def run(folder: Path, source: str, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a job, or of a program when there are no words."""
    (folder / "train.py").write_text(source)
    (folder / "settings.py").write_text(SETTINGS)
    (folder / "input").write_text("first\nsecond\n")
    launch = ["-m", "ft_launcher", "--ft-stall-warning=none", *words] if words else []
    environ = clean_environment("OMP_", OMP_NUM_THREADS="1")
    with (folder / "input").open() as stdin:
        command = [sys.executable, *launch, "train.py"]
        done = program.run(command, folder=folder, environ=environ, limit_s=LIMIT_S, stdin=stdin)
    return done.returncode, done.stdout, done.stderr


def runs(folder: Path, cycle: int, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"runs.{cycle}.{rank}").read_text().splitlines()]


def test_a_rank_starts_again_by_exec_and_the_job_from_then_on(tmp_path: Path) -> None:
    code, _, shown = run(tmp_path, CRASHES, "--nproc-per-node=1", "--max-restarts=1")
    assert code == 0, shown
    forked, again = runs(tmp_path, 0, 0)
    assert (forked[0], forked[1], again[1]) == (again[0], "True", "False")
    assert forked[2] == again[2] == r"'first\n'"
    ((_, mapped, _),) = runs(tmp_path, 1, 0)
    assert mapped == "False"
    said = "Ranks start by exec from now on: the script changes OMP_WAIT_POLICY before it imports torch."
    assert shown.count(said) == shown.count("Ranks start by exec") == 1


def test_what_others_have_seen_is_not_done_twice(tmp_path: Path) -> None:
    code, out, shown = run(tmp_path, REFUSED, "--nproc-per-node=3")
    assert code == 0 and out.count("it goes on passive") == 3, shown
    assert [len(runs(tmp_path, 0, rank)) for rank in range(3)] == [1, 1, 1]
    for reason in ("opened sockets", "started processes", "redirected its standard streams"):
        assert (shown + out).count(f"cannot start again by exec: it has {reason}") == 1, shown


def test_who_insists_gets_an_error(tmp_path: Path) -> None:
    code, _, shown = run(tmp_path, CRASHES, "--nproc-per-node=1", "--max-restarts=1", "--ft-warm-start=on")
    assert code == 2 and not (tmp_path / "runs.1.0").exists(), shown
    said = "warm_start='on' (from --ft-warm-start): the script changes OMP_WAIT_POLICY before it imports torch"
    assert said in shown and "Traceback" not in shown, shown


def test_a_script_that_changes_nothing_of_that_stays_a_fork(tmp_path: Path) -> None:
    ordinary = "os.environ['WANDB_MODE'] = 'offline'\nimport torch\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n"
    code, _, shown = run(tmp_path, LINE + ordinary, "--nproc-per-node=2")
    assert code == 0 and "by exec" not in shown, shown
    assert [len(runs(tmp_path, 0, rank)) for rank in range(2)] == [1, 1]


def test_a_function_starts_again_with_what_it_was_sent(tmp_path: Path) -> None:
    code, out, shown = run(tmp_path, FUNCTION)
    assert code == 0, shown
    assert out.strip() == '{"0": [5000000, 2.0], "1": [5000000, 2.0]}'
    for rank in range(2):
        forked, again = runs(tmp_path, 0, rank)
        assert (forked[0], forked[1], again[1]) == (again[0], "True", "False"), shown
