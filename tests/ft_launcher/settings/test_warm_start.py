"""Why ranks may not be forks of the zygote: every reason, and what is none."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from ft_launcher.settings import warm_start

ARGV = ("/usr/bin/python", "-m", "ft_launcher", "train.py")


@pytest.mark.parametrize(
    ("words", "environ", "argv", "says"),
    [
        (["train.py"], {}, ARGV, ""),
        (["-m", "train"], {"CUDA_VISIBLE_DEVICES": "0"}, ("/usr/bin/python", "-u", "/usr/bin/ft_launcher", "-O"), ""),
        ([], {}, ARGV, "no Python scripts"),
        (["-"], {}, ARGV, "stdin"),
        (["train.py"], {"PYTHON_EXEC": "/opt/python"}, ARGV, "PYTHON_EXEC"),
        (["train.py"], {"NSYS_PROFILING_SESSION_ID": "1"}, ARGV, "nsys"),
        (["train.py"], {}, ("/usr/bin/python", "-O", "-X", "dev", "-m", "ft_launcher"), "-O"),
        (["train.py"], {}, ("/usr/bin/python", "-I", "/usr/bin/ft_launcher"), "-I"),
    ],
)
def test_a_command(words: list[str], environ: dict[str, str], argv: tuple[str, ...], says: str) -> None:
    reason = warm_start.against_command(words, environ, argv)
    assert says in reason and bool(says) == bool(reason)


@pytest.mark.parametrize(
    ("threads", "cuda", "files", "says"),
    [
        (1, False, [], ""),
        (2, False, [], "1 thread "),
        (3, False, [], "2 threads"),
        (1, True, [], "CUDA"),
        (1, False, ["/dev/nvidia0"], "CUDA"),
    ],
)
def test_a_process(threads: int, cuda: bool, files: list[str], says: str) -> None:
    reason = warm_start.against_process(threads, cuda, files)
    assert says in reason and bool(says) == bool(reason)


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        ({}, ""),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "x", "FT_CYCLE": "2", "NCCL_DEBUG": "INFO"}, ""),
        ({"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED"),
        ({"LD_PRELOAD": "x.so", "OMP_NUM_THREADS": "2"}, "LD_PRELOAD, OMP_NUM_THREADS"),
        ({"HOME": "/other"}, "HOME"),
    ],
)
def test_the_environment_of_ranks(rank: dict[str, str], says: str) -> None:
    zygote = {"HOME": "/root", "OMP_NUM_THREADS": "1"}
    reason = warm_start.against_environment({**zygote, **rank}, zygote)
    assert says in reason and bool(says) == bool(reason)


@pytest.mark.parametrize(
    ("changed", "read", "in_c", "found"),
    [
        ({"OMP_NUM_THREADS", "MINE"}, set(), True, ["OMP_NUM_THREADS"]),
        ({"OMP_NUM_THREADS", "MINE"}, {"MINE"}, False, ["MINE"]),
        (
            {"TORCH_LOGS", "MKL_NUM_THREADS", "PYTHONHASHSEED"},
            set(),
            True,
            ["MKL_NUM_THREADS", "PYTHONHASHSEED", "TORCH_LOGS"],
        ),
        ({"HF_HOME", "WANDB_MODE"}, {"HF_HOME"}, True, ["HF_HOME"]),
        ({"TOKENIZERS_PARALLELISM", "WANDB_MODE", "HOME"}, set(), True, []),
        (set(), {"HOME"}, True, []),
    ],
)
def test_variables_that_imports_read(changed: set[str], read: set[str], in_c: bool, found: list[str]) -> None:
    assert warm_start.read_by_imports(changed, read, in_c) == found


@pytest.mark.parametrize(
    ("name", "hides"),
    [("json/__init__.py", True), ("socket.py", True), ("config.py", False), ("json/data.txt", False)],
)
def test_a_module_beside_the_script_that_hides_one_in_use(name: str, hides: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    loaded = {"json": json.__file__, "socket": socket.__file__, "sys": None}
    assert bool(warm_start.against_folder([str(file)], loaded)) == hides
