"""Sends and receives the files of one state between the processes for copies of two nodes.

The bytes of a file go as the body of a frame (`contract/wire/proven_link.py`). After them the sender gives their
SHA-256, in a record that is sealed where the job has a secret, and says whether the file was whole until its end: the
ranks write their oldest file again, and first take away its name. What does not fit leaves no file with a whole name.

Threads: the caller's. Everything here blocks, for `STILL_S` seconds at most without a byte.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rank_monitor.contract.copy_records import CopyAnswer, FileEnd, FileHead, HeldState
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.memory_files import UNFINISHED
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.proven_link import LinkError, ProvenLink

STILL_S = 20.0
"""Seconds without a byte after which the other node counts as gone. A node that is lost is known as such after 15 s."""
GREETING_S = 3.0
"""Seconds in which who has connected must prove itself. Who only connects, from wherever, holds no place for long."""
_CHUNK = 1 << 20
"""Bytes that are read, added to the checksum and sent at once: they stay in the processor's cache."""

_T = TypeVar("_T")


class Refused(Exception):
    """A state is not copied, for a reason in words. The connection may still be used to say so."""


class Transfer:
    """One connection to another node's process.

    Args:
        connection: a connected socket, which stays the caller's.
        job, secret, connects: as for `ProvenLink`.

    Raises:
        LinkError: the other end is no node of this job.
    """

    def __init__(self, connection: socket.socket, job: str, secret: bytes | None, connects: bool) -> None:
        self._connection = connection
        limit_s = STILL_S
        if not connects:
            limit_s = GREETING_S
        self._link = ProvenLink(connection, job, secret, connects, time.monotonic() + limit_s)

    def say(self, record: object, body: int = 0) -> None:
        """Sends a record. Raises LinkError."""
        self._link.send(write_record(record).encode(), body, _deadline())

    def hear(self, kind: type[_T]) -> _T:
        """Returns the next record, which must have no body. Raises LinkError."""
        return self._hear(kind, 0)[0]

    def must_agree(self) -> CopyAnswer:
        """Returns the next answer. Raises Refused where it has a reason; LinkError."""
        answer = self.hear(CopyAnswer)
        if answer.reason:
            raise Refused(answer.reason)
        return answer

    def send_files(self, folder: Path, names: Sequence[str], moved: Callable[[int], None]) -> None:
        """Sends files.

        Args:
            folder: where they are.
            names: of the files.
            moved: called after each part, with its bytes. May wait, to keep to a bandwidth.

        Raises:
            Refused: a file was written again meanwhile; the other node has been told.
            OSError: a file cannot be read. The connection is of no further use.
            LinkError: the other node is gone.
        """
        for name in names:
            if not self._send_file(folder / name, moved):
                raise Refused("its files were written again while they were sent")

    def receive_files(
        self, folder: Path, names: Sequence[str], sizes: Sequence[int], moved: Callable[[int], None]
    ) -> None:
        """Receives files; they have `UNFINISHED` at the end of their names then.

        Args:
            folder: where they shall be.
            names: of the files, in the order in which they come.
            sizes: of each, which was agreed upon.
            moved: called after each part, with its bytes.

        Raises:
            Refused: a file was damaged on its way, or written again meanwhile. None is left here.
            OSError: a file cannot be written. None is left here.
            LinkError: the other node is gone, or sent something else. None is left here.
        """
        try:
            for name, size in zip(names, sizes, strict=True):
                self._receive_file(folder / (name + UNFINISHED), name, size, moved)
        except BaseException:
            for name in names:
                with suppress(OSError):
                    (folder / (name + UNFINISHED)).unlink(missing_ok=True)
            raise

    def _send_file(self, path: Path, moved: Callable[[int], None]) -> bool:
        """Sends a file; returns whether it was whole until its end."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            self.say(FileHead(path.name), found.st_size)
            digest, left = hashlib.sha256(), found.st_size
            while left:
                content = os.read(descriptor, min(_CHUNK, left))
                if not content:
                    raise OSError(0, "it has become shorter", str(path))
                digest.update(content)
                self._put(content)
                left -= len(content)
                moved(len(content))
            is_whole = _is_named_so(path, found)
        finally:
            os.close(descriptor)
        self.say(FileEnd(digest.hexdigest(), is_whole))
        return is_whole

    def _receive_file(self, path: Path, name: str, size: int, moved: Callable[[int], None]) -> None:
        head, left = self._hear(FileHead, size)
        if (head.name, left) != (name, size):
            raise LinkError("the other node sends another file than it said")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            digest, room = hashlib.sha256(), memoryview(bytearray(min(_CHUNK, max(1, left))))
            while left:
                count = self._take(room[: min(len(room), left)])
                digest.update(room[:count])
                _write(descriptor, room[:count])
                left -= count
                moved(count)
        finally:
            os.close(descriptor)
        end = self.hear(FileEnd)
        if not end.is_whole:
            raise Refused("its files were written again while they were sent")
        if end.sha256 != digest.hexdigest():
            raise Refused(f"{name} was damaged on its way")

    def _hear(self, kind: type[_T], most: int) -> tuple[_T, int]:
        """Returns the next record, and how many bytes of a body follow. `most`: as many may. Raises LinkError."""
        text, body = self._link.receive(most, _deadline())
        try:
            return read_record(kind, text), body
        except ProtocolError as problem:
            raise LinkError(f"the other node sent what cannot be read: {problem}") from None

    def _put(self, content: bytes) -> None:
        try:
            self._connection.settimeout(STILL_S)
            self._connection.sendall(content)
        except TimeoutError:
            raise LinkError(f"the other node has taken nothing for {STILL_S:g} s") from None
        except OSError as problem:
            raise LinkError(f"the connection broke: {problem.strerror or problem}") from None

    def _take(self, room: memoryview) -> int:
        try:
            self._connection.settimeout(STILL_S)
            count = self._connection.recv_into(room)
        except TimeoutError:
            raise LinkError(f"the other node has sent nothing for {STILL_S:g} s") from None
        except OSError as problem:
            raise LinkError(f"the connection broke: {problem.strerror or problem}") from None
        if not count:
            raise LinkError("the other node has closed the connection")
        return count


def finish(folder: Path, state: HeldState) -> None:
    """Gives files that have been received their names. Raises OSError."""
    for name in state.files():
        (folder / (name + UNFINISHED)).rename(folder / name)


def _is_named_so(path: Path, found: os.stat_result) -> bool:
    """Returns whether a name still means the same file."""
    try:
        now = path.lstat()
    except OSError:
        return False
    return (now.st_ino, now.st_dev) == (found.st_ino, found.st_dev)


def _write(descriptor: int, content: memoryview) -> None:
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])


def _deadline() -> float:
    return time.monotonic() + STILL_S
