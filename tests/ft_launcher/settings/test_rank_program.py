"""The thing to run: found, readable, runnable, and the command that starts it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_launcher.settings import rank_program
from rank_monitor.contract.errors import ConfigError


def test_a_script_may_be_a_file_a_folder_or_stdin(folder: Path) -> None:
    for name in ("train.py", str(folder / "train.py"), str(folder), "-"):
        rank_program.check_script(name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["no.py", "", "no/train.py"])
def test_a_script_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        rank_program.check_script(name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_script_that_cannot_be_read(folder: Path) -> None:
    (folder / "train.py").chmod(0)
    with pytest.raises(ConfigError, match="cannot read"):
        rank_program.check_script("train.py")


@pytest.mark.parametrize(
    ("command", "mode", "text", "says"),
    [
        ("./run", 0o755, "#!/bin/sh\n", None),
        ("./run", 0o755, "\x7fELF\0", None),
        ("sh", 0o755, "", None),
        ("./run", 0o644, "#!/bin/sh\n", "has no execute permission"),
        ("./run", 0o755, "echo hello\n", "does not name what runs it"),
        ("run", 0o755, "#!/bin/sh\n", "Write it with a path"),
        ("./none", 0o755, "", "there is no such command"),
        (".", 0o755, "", "is not a command that can be run"),
    ],
)
def test_commands(command: str, mode: int, text: str, says: str | None, folder: Path) -> None:
    (folder / "run").write_text(text)
    (folder / "run").chmod(mode)
    if says is None:
        rank_program.check_command(command)
        return
    with pytest.raises(ConfigError, match=says):
        rank_program.check_command(command)


def test_the_bootstrap_comes_before_what_python_runs() -> None:
    assert rank_program.through_bootstrap(["-u", "train.py", "-u"]) == [
        "-u",
        rank_program.bootstrap(),
        "train.py",
        "-u",
    ]
    assert rank_program.through_bootstrap(["-u", "-m", "a.b"]) == ["-u", rank_program.bootstrap(), "-m", "a.b"]
