"""Where files lie, with and without a log folder."""

import os
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from ft_launcher.record.journal.file_thread import FileThread
from ft_launcher.record.logs.logs import KEPT_RUNS, CycleLogs, RunFolder, StdMap, default_parents
from rank_monitor.contract.errors import ConfigError

OWN = f"ft_launcher-{os.geteuid()}"
SHARED = [f"/tmp/{OWN}", f"/dev/shm/{OWN}"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default parent of runs without a log folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ft_launcher"


def reify(
    tmp_path: Path, run: RunFolder, redirects: StdMap, tee: StdMap, shown: set[int] | None = None, cycle: int = 0
):  # type: ignore[no-untyped-def]
    envs = {rank: {"TORCHELASTIC_RESTART_COUNT": str(cycle)} for rank in range(12)}
    runtime = tmp_path / "runtime"
    runtime.mkdir(exist_ok=True)
    return CycleLogs(run, runtime, redirects, tee, shown).reify(envs), envs


def test_without_a_log_folder_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dest, envs = reify(tmp_path, RunFolder(None, "id"), Std.NONE, Std.NONE)
    assert [path.name for path in tmp_path.iterdir()] == ["runtime"]
    assert set(dest.stdouts.values()) == {""}
    assert Path(envs[3]["TORCHELASTIC_ERROR_FILE"]).parent == tmp_path / "runtime" / "cycle_0" / "3"


def test_a_log_folder_has_a_folder_per_cycle_and_rank(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path / "logs"), "my/run")
    assert run.path.name.startswith("my_run-")
    first, _ = reify(tmp_path, run, Std.ALL, Std.NONE)
    Path(first.stdouts[0]).write_text("kept")
    second, _ = reify(tmp_path, run, Std.ALL, Std.NONE, cycle=1)
    assert second.stderrs[11] == str(run.path / "cycle_1" / "11" / "stderr.log")
    assert Path(first.stdouts[0]).read_text() == "kept"


def test_a_folder_that_does_not_answer_is_left_alone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks print to the console then: no files for them, and nothing that changes their environments later."""
    monkeypatch.setattr("ft_launcher.record.logs.logs._RANKS_FILES_S", 0.01)
    files, answers = FileThread(), threading.Event()
    run = RunFolder(str(tmp_path / "logs"), "id", files=files)
    files.submit(answers.wait)
    dest, envs = reify(tmp_path, run, Std.ALL, Std.NONE)
    before = {rank: dict(environ) for rank, environ in envs.items()}
    answers.set()
    files.close(60.0)
    assert envs == before and set(dest.stdouts.values()) == {""}
    assert Path(envs[3]["TORCHELASTIC_ERROR_FILE"]).parent == tmp_path / "runtime" / "cycle_0" / "3"
    assert list(run.path.glob("**/*.log")) == []


def test_maps_take_any_local_rank(tmp_path: Path) -> None:
    dest, _ = reify(tmp_path, RunFolder(str(tmp_path), "id"), {10: Std.OUT}, {11: Std.ERR})
    assert dest.stdouts[10].endswith("stdout.log") and dest.stderrs[10] == ""
    assert dest.tee_stderrs == {11: dest.stderrs[11]}


def test_a_filter_hides_the_others(tmp_path: Path) -> None:
    dest, _ = reify(tmp_path, RunFolder(str(tmp_path), "id"), Std.NONE, Std.OUT, shown={1})
    assert set(dest.tee_stdouts) == {1}
    assert dest.stderrs[0] == "/dev/null" and dest.stderrs[1] == ""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=str(tmp_path / "file")):
        RunFolder(str(tmp_path / "file" / "logs"), "id")


def test_a_default_folder_that_cannot_be_made_is_not_said_to_be_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ft_launcher.record.logs.logs.default_parents", lambda environ: [tmp_path / "file" / "logs"])
    with pytest.raises(ConfigError, match="from the default"):
        RunFolder(None, "id").make()


@pytest.mark.parametrize(
    ("environ", "parents"),
    [
        ({"XDG_STATE_HOME": "/s", "TMPDIR": "/t"}, ["/s/ft_launcher", f"/t/{OWN}", *SHARED]),
        ({"XDG_STATE_HOME": "relative", "TMPDIR": "/t"}, [f"/t/{OWN}", *SHARED]),
        ({"XDG_STATE_HOME": "", "TMPDIR": "/tmp"}, SHARED),
    ],
)
def test_default_parents(environ: dict[str, str], parents: list[str]) -> None:
    assert [str(parent) for parent in default_parents(environ)] == parents


def test_a_default_parent_that_cannot_be_written_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = RunFolder(None, "id")
    assert run.make() == run.path and run.path.parent == tmp_path / OWN
    assert run.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["a link", "writable by all"])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, trap: str, state: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    state.parent.mkdir()
    if trap == "a link":
        state.symlink_to(elsewhere)
    else:
        state.mkdir()
        state.chmod(0o777)
    RunFolder(None, "id").make()
    assert not any(elsewhere.iterdir()) and not any(state.iterdir())


def test_two_runs_of_one_name_have_a_folder_each(state: Path) -> None:
    runs = [RunFolder(None, "same") for _ in range(2)]
    assert runs[0].make() == runs[0].make() != runs[1].make()
    assert len(list(state.iterdir())) == 2


def test_the_last_runs_are_kept_and_those_that_live(state: Path) -> None:
    (state / "not ours").mkdir(parents=True)
    living = RunFolder(None, "living")
    living.make()
    made = []
    for number in range(KEPT_RUNS + 3):
        run = RunFolder(None, f"run{number}")
        run.of_rank(0, 0)
        run.close()
        run.close()
        made.append(run.path)
    kept = [path for path in made if path.exists()]
    assert kept == made[-KEPT_RUNS:]
    assert sorted(state.iterdir()) == sorted([*kept, living.path, state / "not ours"])
    living.close()
    RunFolder(None, "quiet").close()
    assert living.path.exists(), "closed by itself: the next run that keeps something removes it"
    last = RunFolder(None, "last")
    last.make()
    last.close()
    assert not living.path.exists()


def test_a_named_log_folder_is_never_pruned(tmp_path: Path) -> None:
    for number in range(KEPT_RUNS + 2):
        RunFolder(str(tmp_path / "logs"), str(number)).close()
    assert len(list((tmp_path / "logs").iterdir())) == KEPT_RUNS + 2
