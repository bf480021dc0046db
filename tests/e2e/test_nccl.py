"""NCCL's settings as real ranks have them: forked, started by exec, as functions by each start method; the example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import program
from tests.program import ONE_TRY, ROOT, clean_environment

EXAMPLE = ROOT / "scripts" / "examples" / "nccl.py"
LIMIT_S = 300.0
COLLECTIVE = "FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC"

RANK = """
import json, os
from datetime import timedelta

def told():
    import torch
    import torch.distributed as dist

    def timeout_of(group):
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    dist.init_process_group("gloo")
    try:
        explicit = dist.new_group([0], timeout=timedelta(seconds=5))
        variables = {name: text for name, text in os.environ.items() if name.startswith(("TORCH_NCCL_", "FLYTE_"))}
        return variables, timeout_of(dist.group.WORLD), timeout_of(explicit)
    finally:
        dist.destroy_process_group()
"""

SCRIPT = f"{RANK}\nprint('told', json.dumps(told()))\n"

PROGRAM = f"""{RANK}
if __name__ == "__main__":
    import multiprocessing, time
    from ft_launcher import LaunchConfig, launch

    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(0,)).start()  # a server from before
    before = dict(os.environ)
    settings = dict(min_nodes=1, max_nodes=1, nproc_per_node=1, nccl_collective_timeout_sec=66)
    found = [
        launch(told, LaunchConfig(start_method=method, nccl_async_error_handling=True, **settings))()[0]
        for method in ("spawn", "fork", "forkserver")
    ]
    assert dict(os.environ) == before
    print("told", json.dumps(found))
"""


def python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program that has ended well."""
    environ = clean_environment("TORCH_NCCL_", "FLYTE_", **ONE_TRY, **variables)
    return program.run([sys.executable, *words], folder=folder, environ=environ, limit_s=LIMIT_S, check=True)


def run(folder: Path, text: str, *words: str, **variables: str) -> tuple[Any, str]:
    """What a program told, and what it wrote to stderr."""
    (folder / "script.py").write_text(text)
    done = python(folder, *words, "script.py", **variables)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("told "))
    return json.loads(line.removeprefix("told ")), done.stderr


@pytest.mark.parametrize("start", ["auto", "off"])
def test_a_script(tmp_path: Path, start: str) -> None:
    flags = ("--ft-nccl-collective-timeout=77", "--ft-nccl-async-error-handling=2", "--ft-nccl-enable-monitoring=no")
    words = ("-m", "ft_launcher", f"--ft-warm-start={start}", "--max-restarts=2", *flags)
    (variables, timeout_s, explicit_s), stderr = run(tmp_path, SCRIPT, *words, TORCH_NCCL_ENABLE_MONITORING="1")
    assert variables == {
        COLLECTIVE: "77",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }
    assert (timeout_s, explicit_s) == (77.0, 5.0)
    assert "a hang in NCCL" not in stderr and "without effect" not in stderr, "the group is gloo's"


def test_functions(tmp_path: Path) -> None:
    found, _ = run(tmp_path, PROGRAM)
    variables = {
        COLLECTIVE: "66",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert found == [[variables, 66.0, 5.0]] * 3


def test_the_example_gives_up_on_a_rank_that_never_comes_and_starts_again(tmp_path: Path) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--ft-nccl-collective-timeout=8")
    done = python(tmp_path, "-m", "ft_launcher", *flags, str(EXAMPLE))
    assert done.stdout.count("waits in a collective for 8 s") == 4, done.stdout
    assert done.stdout.count("step 2, 1") == 2, done.stdout
    assert "a hang in NCCL" not in done.stderr or torch.cuda.device_count() > 1
    assert "class: hang" in done.stderr
    assert "hangs: it is in no call of torch.distributed, and the others waited for it" in done.stderr
    assert "nccl.py:25 in train" in done.stderr
