"""Files to write to, in a folder where others have been before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rank_monitor.contract.wire.own_file import open_own

APPEND = os.O_WRONLY | os.O_APPEND


def write(path: Path, text: str, flags: int = APPEND) -> None:
    descriptor = open_own(path, flags, 0o600)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def test_a_new_file_has_its_mode_and_an_own_one_is_continued(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write(file, "one")
    assert file.stat().st_mode & 0o777 == 0o600
    write(file, " two")
    assert file.read_text() == "one two"
    write(file, "new", os.O_WRONLY | os.O_TRUNC)
    assert file.read_text() == "new"


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def _second_name(path: Path) -> None:
    path.hardlink_to(path.with_name("victim"))


def _of_another_user(path: Path) -> None:
    path.write_text("theirs")
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("needs root")


@pytest.mark.parametrize("plant", [_link, _second_name, os.mkfifo, _of_another_user, Path.mkdir])
@pytest.mark.parametrize("flags", [APPEND, os.O_RDWR | os.O_APPEND, os.O_WRONLY | os.O_TRUNC])
def test_what_another_user_planted_is_refused(tmp_path: Path, plant: Callable[[Path], None], flags: int) -> None:
    victim, file = tmp_path / "victim", tmp_path / "file"
    victim.write_text("theirs")
    victim.chmod(0o644)
    plant(file)
    with pytest.raises(OSError):
        open_own(file, flags, 0o600)
    assert victim.read_text() == "theirs" and victim.stat().st_mode & 0o777 == 0o644
    assert file.is_dir() or file.is_fifo() or file.read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "file"}, "nothing of ours stays"


def test_a_link_to_nothing_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="a link or a FIFO"):
        open_own(tmp_path / "file", APPEND, 0o600)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/dev/fuse").exists(),
    reason="needs root, unshare and /dev/fuse",
)
def test_the_user_is_the_one_that_the_file_system_shows(tmp_path: Path) -> None:
    """A file server may map users: what this process makes there is shown as somebody else's."""
    serve = ["unshare", "--mount", sys.executable, "-m", "tests.stalled_disk", str(tmp_path)]
    environ = os.environ | {"SHOWN_UID": "12345"}
    with subprocess.Popen(serve, stdout=subprocess.PIPE, env=environ, cwd=Path(__file__).parents[4]) as server:
        assert server.stdout is not None and server.stdout.readline() == b"mounted\n"
        file = Path(f"/proc/{server.pid}/root{tmp_path}/file")
        write(file, "one")
        write(file, " two")
        assert (file.read_text(), file.stat().st_uid) == ("one two", 12345)
        server.kill()
