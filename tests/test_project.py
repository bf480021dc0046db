"""What must hold for the project's files as a whole: they name no machine of ours, the usual files are there, and
ARCHITECTURE.md is true of the code."""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.program import run

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
    names = run(command, folder=ROOT, check=True).stdout
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


EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^\s*from ((?:ft_client|ft_launcher|rank_monitor)\b[\w.]*) import ([\w, ]+\w)", re.MULTILINE)


def test_examples_in_the_guide_import_what_exists() -> None:
    pages = {page.name: page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    asked = [
        (page, module, name)
        for page, text in pages.items()
        for example in EXAMPLE.findall(text)
        for module, names in IMPORT.findall(example)
        for name in names.split(", ")
    ]
    assert asked
    assert [place for place in asked if not is_there(*place[1:])] == []


def is_there(module: str, name: str) -> bool:
    """Whether a module of ours defines a name or imports it, be it for type checkers only."""
    path = ROOT / ("client" if module.startswith("ft_client") else "") / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return any(getattr(node, "name", None) == name for node in nodes)


MAX_BYTES = {"wheel": 1_500_000, "sdist": 1_600_000}
"""Of a package. Mebibytes more are files that somebody did not mean to add."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of the project."""
    packages = {}
    for kind in ("wheel", "sdist"):
        folder = tmp_path_factory.mktemp(kind)
        run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)], folder=ROOT, check=True)
        (packages[kind],) = folder.iterdir()
    return packages


def test_a_wheel_has_the_page(built: dict[str, Path]) -> None:
    """What is no Python file must be there, too."""
    with zipfile.ZipFile(built["wheel"]) as opened:
        names = set(opened.namelist())
    page = ROOT / "ft_launcher" / "tools" / "status" / "page"
    assert {str(file.relative_to(ROOT)) for file in page.iterdir()} <= names
    assert {"ft_alias_nvrx.pth", "ft_as_torchrun.pth", "ft_client/__init__.py", "rank_monitor/__init__.py"} <= names


def test_an_sdist_has_the_guide_and_no_tests(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"README.md", "LICENSE", "docs/hangs.md", "ft_launcher/cli.py", "client/ft_client/__init__.py"} <= names
    assert [name for name in names if name.startswith("tests/")] == []


@pytest.mark.parametrize("kind", MAX_BYTES)
def test_packages_are_small(built: dict[str, Path], kind: str) -> None:
    assert built[kind].stat().st_size <= MAX_BYTES[kind]


def test_the_description_of_a_package_has_no_link_into_the_tree(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = opened.read(name).decode()
    assert "docs/migrate.md" in metadata
    assert re.findall(r"\]\((?!https?:)[^)]*\)", metadata) == []


GUIDE = ROOT / "ARCHITECTURE.md"
MAX_LINES, MAX_COLUMNS = 260, 120
BASES = ("", "ft_launcher", "rank_monitor", "client/ft_client")
"""Folders in which a path of ARCHITECTURE.md may begin."""
NAMED_PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]+\.(?:py|md)\b|(?<=`)(?:[\w.-]+/)+(?=`)")
STATION = re.compile(r"`((?:[\w-]+/)+[\w-]+\.py): ([\w.]+)`")


def named(path: str) -> list[Path]:
    """The files or folders of the project that a path of ARCHITECTURE.md may mean."""
    return [found for base in BASES if (found := ROOT / base / path).exists()]


def has_function(file: Path, name: str) -> bool:
    """Whether a file defines a function or class, or a class of it a method (`Class.method`)."""
    body = ast.parse(file.read_text()).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def test_architecture_names_paths_that_exist() -> None:
    paths = set(NAMED_PATH.findall(GUIDE.read_text()))
    assert len(paths) > 50
    assert {path: len(named(path)) for path in sorted(paths) if len(named(path)) != 1} == {}


def test_architecture_names_functions_that_exist() -> None:
    stations = STATION.findall(GUIDE.read_text())
    assert len(stations) > 50
    wrong = [(path, name) for path, name in stations if not any(has_function(file, name) for file in named(path))]
    assert wrong == []


def test_architecture_maps_every_room() -> None:
    """Every folder with Python files is drawn; those in `integrations/` are of that room."""
    text = GUIDE.read_text()
    folders = {file.parent for base in BASES[1:] for file in (ROOT / base).rglob("*.py")}
    rooms = [room for room in sorted(folders) if "integrations" not in room.parent.parts]
    assert [str(room.relative_to(ROOT)) for room in rooms if f"{room.name}/ " not in text] == []


def test_architecture_is_short() -> None:
    lines = GUIDE.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    rows = [line for line in lines if line.startswith("|")]  # of a table, which Markdown cannot wrap
    assert [line for line in lines if len(line) > MAX_COLUMNS and line not in rows] == []


def test_architecture_names_the_threads_of_the_launcher() -> None:
    """What a thread does and what follows when it fails stands there, so that its name in a list of threads tells."""
    calls = [text for path in (ROOT / "ft_launcher").rglob("*.py") for text in path.read_text().split("Thread(")[1:]]
    names = {name for call in calls for name in re.findall(r'name="(ft_[a-z_]+)', call.partition("start()")[0])}
    assert len(names) > 10
    guide = GUIDE.read_text()
    assert sorted(name for name in names if f"`{name}" not in guide) == []
