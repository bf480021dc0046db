"""Where files lie, with and without a log folder."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from ft_launcher.logs import CycleLogs, RunFolder, StdMap
from rank_monitor.contract.errors import ConfigError


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
    assert not (tmp_path / "ft_logs").exists()
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
