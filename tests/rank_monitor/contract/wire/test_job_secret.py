"""The file with a job's secret: which files are taken, and what is said of the others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rank_monitor.contract.wire.job_secret import MAX_SECRET, MIN_SECRET, read_job_secret

SECRET = b"0123456789abcdef"


def secret_file(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_end_of_the_line_is_no_part_of_a_secret(tmp_path: Path, end: bytes) -> None:
    assert read_job_secret(secret_file(tmp_path, SECRET + end)) == SECRET


def test_a_link_may_lead_to_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret_file(tmp_path))
    assert read_job_secret(link) == SECRET


@pytest.mark.parametrize("size", [MIN_SECRET, MAX_SECRET])
def test_the_shortest_and_the_longest_are_taken(tmp_path: Path, size: int) -> None:
    assert read_job_secret(secret_file(tmp_path, b"x" * size + b"\r\n")) == b"x" * size


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 bytes"),
        (b"x" * (MIN_SECRET - 1) + b"\n", f"has {MIN_SECRET - 1} bytes"),
        (b"x" * (MAX_SECRET + 1), f"more than {MAX_SECRET}"),
        (b"x" * (MAX_SECRET * 9), f"more than {MAX_SECRET}"),
    ],
)
def test_one_of_another_size_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_job_secret(secret_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_one_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=f"open to other users .mode {mode:04o}"):
        read_job_secret(secret_file(tmp_path, mode=mode))


def owned_by(monkeypatch: pytest.MonkeyPatch, path: Path, uid: int) -> None:
    """Has the file look like one of another user, to a process of user 1000."""
    found = list(path.stat())
    found[stat.ST_UID] = uid
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result(found))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize("mode", [0o600, 0o440])
def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    path = secret_file(tmp_path, mode=mode)
    owned_by(monkeypatch, path, 1001)
    with pytest.raises(ValueError, match=r"of another user .uid 1001, and this is 1000"):
        read_job_secret(path)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_one_of_root_that_the_group_may_read_is_a_mounted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    path = secret_file(tmp_path, mode=mode)
    owned_by(monkeypatch, path, 0)
    assert read_job_secret(path) == SECRET


@pytest.mark.parametrize("mode", [0o444, 0o644, 0o660, 0o620])
def test_one_of_root_that_others_may_read_or_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    path = secret_file(tmp_path, mode=mode)
    owned_by(monkeypatch, path, 0)
    with pytest.raises(ValueError, match="open to other users"):
        read_job_secret(path)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "nothing", ""):
        with pytest.raises(ValueError, match="cannot be read"):
            read_job_secret(tmp_path / name)
