"""The files per cycle of NVIDIA's launcher: names, Slurm's lists, records and what a reader finds at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.record.logs.cycle_files import (
    ApplicationLog,
    CycleInfo,
    application_log,
    current_info,
    node_list,
    open_application_log,
    rank_list,
)
from ft_launcher.record.logs.log_pump import Stream
from rank_monitor.contract.settings.config import RecordSettings
from tests.patience import until

SLURM = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"}
KEYS = [
    *("job_id", "attempt_index", "cycle_number", "cycle_start_time", "cycle_end_time", "cycle_log_file"),
    *("active_nodes", "standby_nodes", "generation", "active_ranks"),
]
"""As the peer's reader and protobuf have them, in the order of the message."""


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())  # type: ignore[no-any-return]


def test_a_link_of_another_is_not_followed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "files"
    victim.write_text("theirs")
    folder.mkdir()
    log = application_log(str(folder / "log"), 0)
    for planted in (log, folder / "cycle_info.7.2.0.tmp", folder / "cycle_info.7.current.tmp"):
        planted.symlink_to(victim)
    assert open_application_log(log, {0: {"RANK": "0", "WORLD_SIZE": "1"}}) is None
    info = writer(folder)
    info.begin(0, ["n1"], [])
    info.close()
    assert read(folder, "cycle_info.7.2.0")["cycle_number"] == 0
    assert victim.read_text() == "theirs"


def writer(folder: Path, environ: dict[str, str] | None = None, **more: str) -> CycleInfo:
    return CycleInfo(RecordSettings(cycle_info_dir=str(folder), **more), SLURM if environ is None else environ)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        ("/logs/job.log", "/logs/job_cycle3.log"),
        ("/logs/job", "/logs/job_cycle3.log"),
        ("/logs/job.txt", "/logs/job_cycle3.txt"),
        ("/logs/a.b/job", "/logs/a.b/job_cycle3.log"),
    ],
)
def test_the_name_of_a_cycles_log(prefix: str, path: str) -> None:
    assert application_log(prefix, 3) == Path(path)


@pytest.mark.parametrize(
    ("names", "nodes", "ranks"),
    [
        ([], "", ""),
        (["node001"], "node[001]", "0"),
        (["node003", "node001.cluster", "node002", "node007"], "node[001-003,007]", "1-2,0,3"),
        (["b2", "a1", "b1"], "a[1],b[1-2]", "1-2,0"),
        (["n9", "n10"], "n[09-10]", "0-1"),
        (["n1", "n1"], "n[1]", "0-1"),
        (["login", "n2", "n1"], "login,n1,n2", "2,1,0"),
    ],
)
def test_nodes_and_ranks_as_slurm_writes_them(names: list[str], nodes: str, ranks: str) -> None:
    assert (node_list(names), rank_list(names)) == (nodes, ranks)


def test_records_of_two_cycles(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "nvrx"
    info = writer(folder, per_cycle_applog_prefix="/logs/job.log")
    info.begin(0, ["n1", "n2"], ["n3"])
    info.end()
    info.end()
    info.begin(1, ["n1", "n3"], [])
    info.close()
    first, second = read(folder, "cycle_info.7.2.0"), read(folder, "cycle_info.7.2.1")
    assert list(first) == KEYS
    assert (first["job_id"], first["attempt_index"], first["cycle_number"], first["generation"]) == ("7", 2, 0, "1")
    assert first["cycle_start_time"].endswith("Z") and first["cycle_start_time"] <= first["cycle_end_time"]
    assert (first["active_nodes"], first["standby_nodes"], first["active_ranks"]) == ("n[1-2]", "n[3]", "0-1")
    assert (first["cycle_log_file"], second["cycle_log_file"]) == ("/logs/job_cycle0.log", "/logs/job_cycle1.log")
    assert (folder / "cycle_info.7.current").readlink() == Path("cycle_info.7.2.1")
    assert second["cycle_end_time"] and second["active_nodes"] == "n[1,3]"
    assert sorted(file.name for file in folder.iterdir()) == [
        "cycle_info.7.2.0",
        "cycle_info.7.2.1",
        "cycle_info.7.current",
    ]


def test_a_cycle_whose_first_node_is_lost_gets_its_end_from_the_next(tmp_path: Path) -> None:
    lost = writer(tmp_path)
    lost.begin(0, ["n1", "n2"], [])
    until((tmp_path / "cycle_info.7.current").exists, "the record of the cycle")
    at_its_loss = (tmp_path / "cycle_info.7.2.0").read_text()
    lost.close()
    (tmp_path / "cycle_info.7.2.0").write_text(at_its_loss)  # its end is never written
    assert read(tmp_path, "cycle_info.7.2.0")["cycle_end_time"] == ""
    later = writer(tmp_path, {**SLURM, "SLURM_RESTART_COUNT": "3"})
    later.begin(1, ["n2"], [])
    later.close()
    assert read(tmp_path, "cycle_info.7.2.0")["cycle_end_time"] == "", "of another attempt: when it ended nobody knows"
    (tmp_path / "cycle_info.7.current").unlink()
    (tmp_path / "cycle_info.7.current").symlink_to("cycle_info.7.2.0")
    other = writer(tmp_path)
    other.begin(1, ["n2"], [])
    other.close()
    first, second = read(tmp_path, "cycle_info.7.2.0"), read(tmp_path, "cycle_info.7.2.1")
    assert first["cycle_end_time"] == second["cycle_start_time"] and first["generation"] == "1"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"job_id": "7", "attempt_index": 2}', "\x00"])
def test_what_stands_in_the_folder_does_no_harm(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "cycle_info.7.current").symlink_to("cycle_info.7.2.0")
    (tmp_path / "cycle_info.7.current.tmp").touch()
    if content is not None:
        (tmp_path / "cycle_info.7.2.0").write_text(content)
    info = writer(tmp_path)
    info.begin(1, [], [])
    info.close()
    assert read(tmp_path, "cycle_info.7.current")["cycle_number"] == 1


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = tmp_path / "stdout.log"
    written.write_text("a line\nand another\n")
    file = Path("/dev/full").open("a")  # noqa: SIM115  (the log closes it)
    streams = [Stream(str(written), f"{rank}: ", file, lambda line: True) for rank in range(2)]
    log = ApplicationLog(file, streams)
    log.start()
    log.stop()
    assert caplog.text.count("the log of the cycle misses lines: /dev/full") == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    info = writer(tmp_path / "file")
    info.begin(0, ["n1"], [])
    info.close()
    assert caplog.text.count("the file of the cycle cannot be written") == 2


@pytest.mark.parametrize(
    ("asked", "environ", "job"),
    [
        (None, SLURM, "7"),
        (None, {"SLURM_JOB_ID": "9"}, "9"),
        (None, {}, ""),
        ("mine", SLURM, "mine"),
        ("a/b", {}, "a_b"),
    ],
)
def test_what_ranks_find_it_by(asked: str | None, environ: dict[str, str], job: str, tmp_path: Path) -> None:
    settings = RecordSettings(cycle_info_dir=f"{tmp_path}/", cycle_info_job_id=asked)
    assert current_info(settings, environ) == tmp_path / f"cycle_info.{job}.current"
    assert current_info(RecordSettings(), environ) is None
