"""The choice of tests: the same for all workers, of the size asked for, another with each seed, and what changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.changes import changed_paths
from tests.program import ROOT, run
from tests.sampling import JOBS, JOBS_OF, concerned_by, is_chosen

CASES = [f"{JOBS[0]}test_a.py::test_b[{number}]" for number in range(10_000)]


def chosen(seed: str, share: float) -> set[str]:
    return {case for case in CASES if is_chosen(case, seed, share)}


def test_a_share_of_the_tests_that_start_jobs() -> None:
    assert abs(len(chosen("1", 0.3)) - 3000) < 200
    assert chosen("1", 1.0) == set(CASES)
    assert chosen("1", 0.0) == set()


def test_the_seed_chooses() -> None:
    assert chosen("1", 0.3) == chosen("1", 0.3)
    assert chosen("1", 0.3) != chosen("2", 0.3)


def test_all_others_are_run() -> None:
    assert is_chosen("tests/rank_monitor/test_log.py::test_a", "1", 0.0)


def test_a_long_test_is_chosen_wherever_it_is() -> None:
    assert not is_chosen("tests/rank_monitor/test_log.py::test_a", "1", 0.0, is_slow=True)
    assert is_chosen("tests/rank_monitor/test_log.py::test_a", "1", 1.0, is_slow=True)


def test_what_changed_is_run_whatever_the_seed_is() -> None:
    always = ("tests/faults/test_top", "tests/e2e/")
    assert is_chosen("tests/faults/test_top.py::test_a", "1", 0.0, always=always)
    assert is_chosen("tests/e2e/test_nccl.py::test_a", "1", 0.0, always=always)
    assert not is_chosen("tests/faults/test_wire.py::test_a", "1", 0.0, always=always)
    assert not is_chosen("tests/e2e/test_nccl.py::test_a", "1", 0.0, is_slow=True, always=always)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], []),
        (["README.md", "docs/nodes.md", "tests/program.py", "tests/conftest.py"], []),
        (["tests/faults/test_top.py"], ["tests/faults/test_top.py"]),
        (["tests/faults/test_top.py", "tests/faults/job.py"], ["tests/faults/"]),
        (["tests/client/inprocess/assignment/test_layers.py"], ["tests/client/inprocess/assignment/test_layers.py"]),
        (["ft_launcher/tools/bundle/allowed.py"], ["tests/faults/test_bundle"]),
        (["ft_launcher/agent/node_agent.py"], ["tests/demo/", "tests/e2e/", "tests/faults/", "tests/nodes/"]),
        (["ft_launcher/node/ranks/a.py", "ft_launcher/tools/bundle/b.py"], ["tests/e2e/", "tests/faults/"]),
        (["ft_launcher/node/zygote/pool.py"], ["tests/e2e/", "tests/faults/", "tests/ft_launcher/node/zygote/"]),
        (["client/ft_client/integrations/nvrx_alias/x.py"], ["tests/client/integrations/"]),
        (["scripts/slurm/node.sh"], ["tests/slurm/"]),
        (["configs/spares.yaml"], ["tests/faults/test_configs"]),
    ],
    ids=str,
)
def test_a_change_and_its_tests(changed: list[str], expected: list[str]) -> None:
    assert concerned_by(changed) == expected


def test_every_room_names_tests_that_exist() -> None:
    """Rooms move, and tests get other names: what is not found any more would silently depend on the seed again."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    missing = [name for names in JOBS_OF.values() for name in names if not any(one.startswith(name) for one in files)]
    assert missing == []
    packages = (ROOT / "ft_launcher", ROOT / "client" / "ft_client")
    rooms = [room for package in packages for room in package.iterdir() if (room / "__init__.py").exists()]
    assert [f"{room.relative_to(ROOT)}/" for room in rooms if f"{room.relative_to(ROOT)}/" not in JOBS_OF] == []
    assert [name for name in JOBS_OF if not (ROOT / name).exists()] == []


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    run(["git", *who, *words], folder=folder, check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two files, on main."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    for name in ("old.py", "other.py"):
        (tmp_path / name).write_text("first\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def commit(repository: Path, name: str) -> None:
    (repository / name).write_text("changed\n")
    git(repository, "add", name)
    git(repository, "commit", "--quiet", "-m", name)


def test_changes_since_the_branch_left_main(repository: Path) -> None:
    git(repository, "switch", "--quiet", "--create", "branch")
    commit(repository, "old.py")
    git(repository, "switch", "--quiet", "main")
    commit(repository, "of_main.py")
    git(repository, "switch", "--quiet", "branch")
    (repository / "other.py").unlink()
    (repository / "new.py").touch()
    assert changed_paths(repository) == ["new.py", "old.py", "other.py"]


def test_changes_on_main_since_the_last_tag(repository: Path) -> None:
    commit(repository, "before.py")
    git(repository, "tag", "v1")
    commit(repository, "after.py")
    assert changed_paths(repository) == ["after.py"]


def test_changes_on_main_without_a_tag_are_those_not_committed(repository: Path) -> None:
    (repository / "old.py").write_text("changed\n")
    assert changed_paths(repository) == ["old.py"]


def test_without_git_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed_paths(tmp_path) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert changed_paths(ROOT) == []


def test_pytest_collects_without_its_cache() -> None:
    """Read-only checkouts are tested so."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--collect-only",
        "-q",
        __file__,
    ]
    run(words, folder=ROOT, check=True)
