"""Who owns a folder of state in memory: real locks of real processes."""

from __future__ import annotations

import collections
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rank_monitor.contract.memory_files import OWNER_NAME
from rank_monitor.contract.processes import memory_folder
from rank_monitor.contract.processes.memory_folder import OwnedFolder, Owner, make, take
from tests.patience import until
from tests.program import python

OWNER = Owner(tag="t" * 16, pid=7, started=1, boot="b", seen_s=1.5, linger_s=600.0)


def made(path: Path) -> OwnedFolder:
    found = make(path)
    assert found is not None
    return found


def test_a_new_folder_is_this_users_alone_and_has_no_record(tmp_path: Path) -> None:
    owned = made(tmp_path / "f")
    assert stat.S_IMODE(owned.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((owned.path / OWNER_NAME).stat().st_mode) == 0o600
    assert owned.read() is None
    owned.write(OWNER)
    assert owned.read() == memory_folder.read_owner(owned.path) == OWNER
    assert owned.names() == [OWNER_NAME]


def test_nobody_else_gets_it_while_its_owner_lives(tmp_path: Path) -> None:
    owned = made(tmp_path / "f")
    owned.write(OWNER)
    assert make(owned.path) is None
    assert take(owned.path) is None
    owned.release()
    (owned.path / "step").write_text("x")
    again = made(owned.path)
    assert again.read() == OWNER and "step" in again.names()
    again.release()
    found = take(owned.path)
    assert found is not None
    found.release()


def test_the_kernel_gives_it_free_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from pathlib import Path; from rank_monitor.contract.processes import memory_folder\n"
        "owned = memory_folder.make(Path(sys.argv[1]))\n"
        "assert owned is not None\n"
        "pid = os.fork()\n"
        "if pid == 0: os.execv(sys.executable, [sys.executable, '-c', 'pass'])\n"
        "os.waitpid(pid, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with pytest.raises(AssertionError, match="exit code -9"):
        python(code, str(tmp_path / "f"))
    made(tmp_path / "f").release()


def test_a_folder_that_is_set_aside_is_out_of_the_way_at_once(tmp_path: Path) -> None:
    owned = made(tmp_path / "f")
    (owned.path / "step").write_text("x")
    aside = owned.set_aside()
    assert not owned.path.exists() and memory_folder.is_aside(aside.name) and not memory_folder.is_aside("f")
    new = made(tmp_path / "f")
    assert new.names() == [OWNER_NAME]
    memory_folder.remove_aside(aside)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_who_waits_for_the_lock_does_not_get_what_is_removed_meanwhile(tmp_path: Path) -> None:
    """One starts again and again, the other removes again and again: an owner always has the folder of that name."""
    path, stop, wrong = tmp_path / "f", threading.Event(), []
    counts = collections.Counter[str]()

    def removes() -> None:
        while not stop.is_set():
            found = take(path)
            if found is not None:
                memory_folder.remove_aside(found.set_aside())
                counts["removed"] += 1

    def owns() -> bool:
        for _ in range(50):
            owned = make(path)
            if owned is not None:
                owned.write(OWNER)
                if memory_folder.read_owner(path) != OWNER:
                    wrong.append("the record is in another file")
                owned.release()
                counts["owned"] += 1
        assert thread.is_alive()
        return bool(wrong) or min(counts["owned"], counts["removed"]) >= 100

    thread = threading.Thread(target=removes)
    thread.start()
    try:
        until(owns, "a hundred owners and as many removals")
    finally:
        stop.set()
        thread.join()
    assert not wrong


def opened(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: path.symlink_to("other"), "a link"),
        (lambda path: path.write_text("x"), "no folder"),
        (opened, "other users may enter"),
    ],
    ids=["a link", "a file", "open to others"],
)
def test_what_is_no_folder_of_this_user_alone_is_refused(
    tmp_path: Path, prepare: Callable[[Path], object], says: str
) -> None:
    path, other = tmp_path / "f", tmp_path / "other"
    other.mkdir(0o700)
    prepare(path)
    with pytest.raises(PermissionError, match=says):
        make(path)
    assert take(path) is None
    assert not list(other.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.mkdir(0o700)
    os.chown(path, 4711, 4711)
    with pytest.raises(PermissionError, match=r"another user \(uid 4711\)"):
        make(path)
    assert take(path) is None and not list(path.iterdir())


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"tag": 1}', b"\xff" * 2000])
def test_a_record_that_makes_no_sense_is_none(tmp_path: Path, text: bytes) -> None:
    owned = made(tmp_path / "f")
    (owned.path / OWNER_NAME).write_bytes(text)
    assert owned.read() is None
    assert memory_folder.read_owner(owned.path) is None


def test_a_later_releases_record_is_read(tmp_path: Path) -> None:
    owned = made(tmp_path / "f")
    owned.write(OWNER)
    text = (owned.path / OWNER_NAME).read_text().replace("{", '{"of_tomorrow": 5, ', 1)
    (owned.path / OWNER_NAME).write_text(text)
    assert owned.read() == OWNER


def test_nothing_is_taken_where_nothing_is(tmp_path: Path) -> None:
    assert take(tmp_path / "missing") is None
    assert memory_folder.read_owner(tmp_path / "missing") is None
