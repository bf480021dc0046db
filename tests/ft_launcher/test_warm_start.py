"""Why ranks may not be forks of the zygote: every reason, and what is none."""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path

import pytest

from ft_launcher import warm_start

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
    ("source", "line"),
    [
        ("import torch\nimport os\nos.environ['A'] = '1'\n", 0),
        ("import os\nos.environ['A'] = '1'\nimport torch\n", 2),
        ("import os\nos.environ.setdefault('A', '1')\nfrom torch import nn\n", 2),
        ("import os\nos.putenv('A', '1')\nimport transformers\n", 2),
        ("from os import environ\nenviron.update(A='1')\nfrom . import model\n", 2),
        ("import os\ndel os.environ['A']\nimport json\n", 0),
        ("import os\nprint(os.environ['A'], os.environ.get('B'))\nimport torch\n", 0),
        ("import os\ndef main():\n    os.environ['A'] = '1'\n    import torch\nmain()\n", 3),
        ("import os\nif True:\n    os.environ |= {}\n    os.environ['A'] = ''\nimport torch", 4),
        ("def broken(:\n", 0),
        ("", 0),
    ],
)
def test_a_script_that_sets_variables_before_it_imports_torch(source: str, line: int) -> None:
    assert warm_start.writes_environment_first(source.encode()) == line


def test_a_script_is_looked_at_again_when_it_was_edited(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import torch\n")
    look = warm_start.ScriptLook([str(file)], [])
    assert look.against_source() == ""
    file.write_text("import os\nos.environ['A'] = '1'\nimport torch\n")
    assert "line 2 of train.py" in look.against_source()
    file.write_text("import torch  # again\n")
    assert look.against_source() == ""


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
    assert bool(warm_start.ScriptLook([str(file)], []).against_folder(loaded)) == hides


def test_the_source_of_a_module_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    source = "import os\nos.environ['A'] = '1'\nimport torch\n"
    (tmp_path / "package" / "__main__.py").write_text(textwrap.dedent(source))
    (tmp_path / "package" / "train.py").write_text(source)
    for words in (["-m", "package"], ["-m", "package.train"], ["package"]):
        assert "line 2" in warm_start.ScriptLook(words, []).against_source()
    assert warm_start.ScriptLook(["-m", "no_such_module"], []).against_source() == ""
