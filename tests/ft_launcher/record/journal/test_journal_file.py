"""A journal's file is bounded, ends in whole lines, and loses nothing that fits later."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.record.journal.access import Access
from ft_launcher.record.journal.journal import JournalFile
from tests.descriptors import open_at

MAX = 100


def first_line(piece: int, lost: int) -> str:
    return f"piece {piece}, lost {lost}"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., JournalFile]]:
    files = []

    def open_file(name: str = "journal.host.jsonl", max_bytes: int | None = MAX) -> JournalFile:
        files.append(JournalFile(tmp_path / name, Access(), max_bytes, first_line))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


def content(folder: Path) -> dict[str, list[str]]:
    return {file.name: file.read_text().splitlines() for file in sorted(folder.iterdir())}


def line(number: int) -> str:
    return f"{number:04}" + "x" * 35


def test_below_its_size_it_is_one_file(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    file = opened()
    file.append(line(0))
    file.append(line(1))
    assert content(tmp_path) == {"journal.host.jsonl": [line(0), line(1)]}


def test_the_first_piece_and_the_latest_are_kept(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    file = opened()
    for number in range(20):
        file.append(line(number))
    kept = content(tmp_path)
    assert list(kept) == ["journal.host.1.jsonl", "journal.host.2.jsonl", "journal.host.jsonl"]
    assert kept["journal.host.1.jsonl"] == [line(0), line(1)]
    latest, growing = kept["journal.host.2.jsonl"], kept["journal.host.jsonl"]
    last = [row for row in (*latest, *growing) if not row.startswith("piece")]
    assert last == [line(number) for number in range(20)][-len(last) :], "no gap up to now"
    assert latest[0].startswith("piece ") and growing[0].startswith("piece ")
    lost = int(growing[0].rpartition(" ")[2])
    assert 0 < lost <= MAX, "the piece that went"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * MAX


def test_a_line_that_is_longer_than_a_piece_has_one_of_its_own(
    opened: Callable[..., JournalFile], tmp_path: Path
) -> None:
    file = opened()
    file.append("y" * 300)
    file.append(line(1))
    assert content(tmp_path)["journal.host.1.jsonl"] == ["y" * 300]
    assert content(tmp_path)["journal.host.jsonl"] == [first_line(2, 0), line(1)]
    file.append("z" * 99)
    file.append("y" * 300)
    assert content(tmp_path)["journal.host.2.jsonl"][1:] == ["z" * 99]
    assert content(tmp_path)["journal.host.jsonl"][1:] == ["y" * 300], "each ends a piece, and not many"


def test_without_a_size_it_is_never_rotated(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    file = opened(max_bytes=None)
    for number in range(50):
        file.append(line(number))
    assert list(content(tmp_path)) == ["journal.host.jsonl"]


def test_a_later_attempt_goes_on_where_the_first_ended(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    for number in range(6):
        file = opened()
        file.append(line(number))
        file.close()
    kept = content(tmp_path)
    assert kept["journal.host.1.jsonl"] == [line(0), line(1)]
    assert kept["journal.host.jsonl"][-1] == line(5)


def test_half_a_line_of_a_killed_launcher_stays_a_line_of_its_own(
    opened: Callable[..., JournalFile], tmp_path: Path
) -> None:
    (tmp_path / "journal.host.jsonl").write_text('{"whole": 1}\n{"hal')
    opened().append(line(0))
    assert content(tmp_path)["journal.host.jsonl"] == ['{"whole": 1}', '{"hal', line(0)]


def test_two_launchers_of_one_host_have_a_file_each(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    files = [opened() for _ in range(3)]
    for number, file in enumerate(files):
        file.append(line(number))
    names = ["journal.host.jsonl", "journal.host_2.jsonl", "journal.host_3.jsonl"]
    assert content(tmp_path) == {name: [line(number)] for number, name in enumerate(names)}
    assert [file.path.name for file in files] == names
    files[0].close()
    assert opened().path.name == names[0], "whose launcher has ended"


def test_a_child_that_has_the_file_open_keeps_it_from_nobody(
    opened: Callable[..., JournalFile], tmp_path: Path
) -> None:
    file = opened()
    inherited = os.dup(open_at(file.path))
    file.close()
    assert opened().path.name == "journal.host.jsonl"
    os.close(inherited)


class Disk:
    """`os.write` of a disk with so many bytes of room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr("ft_launcher.record.journal.journal.os.write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


def test_lines_that_did_not_fit_are_written_once_there_is_room(
    opened: Callable[..., JournalFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, room=60)
    file = opened(max_bytes=None)
    file.append(line(0))
    for number in (1, 2):
        with pytest.raises(OSError, match="No space"):
            file.append(line(number))
    disk.room = 1000
    file.append(line(3))
    assert content(tmp_path)["journal.host.jsonl"] == [line(number) for number in range(4)]
    assert file.dropped == 0


def test_what_waits_for_room_is_bounded(
    opened: Callable[..., JournalFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_launcher.record.journal.journal._MAX_UNSENT", 100)
    disk = Disk(monkeypatch, room=10)
    file = opened(max_bytes=None)
    for number in range(5):
        with pytest.raises(OSError, match="No space"):
            file.append(line(number))
    disk.room = 1000
    file.append(line(5))
    assert content(tmp_path)["journal.host.jsonl"] == [line(0), line(1), line(5)]
    assert file.dropped == 3


def test_a_piece_that_cannot_be_begun_keeps_the_bound(
    opened: Callable[..., JournalFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened()
    file.append(line(0))
    file.append(line(1))
    with monkeypatch.context() as patch:
        patch.setattr("ft_launcher.record.journal.journal._open", _refuse)
        with pytest.raises(OSError, match="inodes"):
            file.append(line(2))
        assert content(tmp_path) == {"journal.host.jsonl": [line(0), line(1)]}
    file.append(line(3))
    assert content(tmp_path)["journal.host.jsonl"] == [first_line(2, 0), line(2), line(3)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(5, 120), st.integers(0, 400)), max_size=40),
    st.one_of(st.none(), st.integers(1, 300)),
    st.lists(st.integers(0, 40), max_size=3),
)
def test_whatever_comes_it_is_bounded_in_order_and_ends(
    written: list[tuple[int, int]], max_bytes: int | None, restarts: list[int]
) -> None:
    """Lines of any length, on a disk that gets some room before each: `written` has both."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        disk = Disk(patch, room=0)
        rows = [f"{number:04}".ljust(length, "x") for number, (length, _) in enumerate(written)]
        file = JournalFile(folder / "journal.host.jsonl", Access(), max_bytes, first_line)
        for number, row in enumerate(rows):
            if number in restarts:
                file.close()
                file = JournalFile(folder / "journal.host.jsonl", Access(), max_bytes, first_line)
            disk.room += written[number][1]
            with contextlib.suppress(OSError):
                file.append(row)
        disk.room = 1 << 20
        file.append("9999")
        file.close()
        pieces = content(folder)
        found = [row for rows_of in pieces.values() for row in rows_of if row in rows or row == "9999"]
        assert found == sorted(found) and len(set(found)) == len(found) and found[-1] == "9999"
        assert len(pieces) <= 3
        if max_bytes is None:
            # A launcher that ends while the disk is full leaves what did not fit, and half a line.
            assert restarts or found == [*rows, "9999"]
        else:
            longest = max(map(len, [*rows, first_line(99, max_bytes + 200)])) + 1
            assert all(path.stat().st_size <= max(max_bytes, 2 * longest + 1) for path in folder.iterdir())


def _refuse(path: Path, access: Access) -> int:
    raise OSError(errno.ENOSPC, "no inodes left")


def test_a_file_that_somebody_removed_is_begun_again(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    file = opened()
    file.append(line(0))
    file.append(line(1))
    file.path.unlink()
    file.append(line(2))
    assert content(tmp_path) == {"journal.host.jsonl": [first_line(2, 0), line(2)]}


def test_the_user_alone_may_read_every_piece(opened: Callable[..., JournalFile], tmp_path: Path) -> None:
    file = opened()
    for number in range(10):
        file.append(line(number))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
