"""What must hold for the project's files as a whole: they name no machine of ours, and the usual files are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MACHINE_PATH = re.compile(r"(?<![\w.$}/*-])/(work|root|home|Users)/\w")
REGISTRY = re.compile(
    r"(pypi|anaconda|jfrog)\.(org|io|com)|pythonhosted\.org|download\.pytorch\.org|extra-index-url|find-links"
)
USUAL_FILES = ("LICENSE", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", ".ci/run")


def project_files() -> list[Path]:
    """The files of the project that hold text: tracked, or new and not ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: cannot tell the project's files from others")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in names.split("\0") if name]
    return [file for file in files if file.is_file() and file != Path(__file__) and b"\0" not in file.read_bytes()]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["path of a machine", "package registry"])
def test_files_name_no(pattern: re.Pattern[str]) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in project_files()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


@pytest.mark.parametrize("name", USUAL_FILES)
def test_the_usual_files_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0


def test_every_pinned_version_is_a_dependency() -> None:
    """A pin in constraints.txt that nothing asks for is left over; torch is pinned in any case."""
    wanted = re.findall(r'"([A-Za-z][\w.-]*)[^"]*"', (ROOT / "pyproject.toml").read_text())
    pins = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert "torch" in pins
    assert not set(pins) - set(wanted)
