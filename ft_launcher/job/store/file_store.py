"""A job's store in a folder of a shared file system: torch's `Store` interface, with one file for each key.

`store_connection.py` makes one for `--rdzv-backend=c10d --rdzv-conf store_type=file`. torch's own `FileStore` would not
do: it appends every write, also each beat, to one file, which grows for as long as the job lasts. What the keys mean is
not known here.

    <folder>/lock         held (flock) by the writer, over all hosts
             =<key>       the value of one key; the name is quoted, so that a key may contain a slash
             <pid>.<thread>.tmp   a value that is being written

A write is a rename, which is atomic: readers take no lock, and never see half a value. A wait polls, as torch's does: a
shared file system does not notify other hosts of changes. Several hosts, processes and threads may use one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ft_launcher.job.store.store_base import WaitingStore, bytes_of
from rank_monitor.contract.wire.own_file import open_own

_LOCK = "lock"
# Seconds: bounds of the pause between two polls, which is a fifth of the wait until then. What is written soon is seen
# soon, and a long wait costs little.
_SHORT_S, _LONG_S = 0.005, 0.05


class FolderStore(WaitingStore):
    """A store whose keys are the files `=KEY` of a folder. Several hosts, processes and threads may use it.

    The first write makes the folder. Operations raise OSError if the file system refuses.
    """

    serves_many_jobs = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.set_timeout(timedelta(minutes=1))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See base class."""
        with self._locked():
            for key, value in zip(keys, values, strict=True):
                self._write(key, bytes_of(value))

    def add(self, key: str, num: int) -> int:
        """Adds to a counter, 0 where there is none; returns the sum."""
        with self._locked():
            sum_ = int(self._value(key) or b"0") + num
            self._write(key, b"%d" % sum_)
        return sum_

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes if the value is the expected one, or if there is none and none (empty) was expected.

        Returns what the key has now; the expected value where it has none, as TCPStore does.
        """
        wanted, new = bytes_of(expected), bytes_of(desired)
        with self._locked():
            now = self._value(key)
            if now == wanted or (now is None and not wanted):
                self._write(key, new)
                return new
        if now is None:
            return wanted
        return now

    def delete_key(self, key: str) -> bool:
        """Removes a key. Returns whether it was there."""
        try:
            self._at(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def remove_keys(self, prefix: str, but: str) -> None:
        """See base class."""
        for file in self.folder.glob("=*"):
            if file.name.startswith(_name(prefix)) and not file.name.startswith(_name(but)):
                file.unlink(missing_ok=True)

    def remove_job(self, record: str, token: Any, prefix: str) -> None:
        """Removes the folder with all keys, if the key `record` still has this value.

        The folder is renamed under the lock first: a writer of the next attempt makes a new one, and loses nothing.
        """
        removed = self.folder.with_name(f"{self.folder.name}.{os.getpid()}.removed")
        with contextlib.suppress(FileNotFoundError), self._locked():
            if self._value(record) != token:
                return
            self.folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Context that holds the lock of writers: at most one at a time, over all hosts.

        Where the folder was removed while this waited for the lock, the lock is that of a file that is gone. Then it
        begins again, with a new folder.
        """
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_own(self.folder / _LOCK, os.O_RDWR, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self.folder / _LOCK)):
                        yield
                        return
            finally:
                os.close(descriptor)

    def _write(self, key: str, value: bytes) -> None:
        """Replaces the value of a key. The caller holds the lock."""
        written = self.folder / f"{os.getpid()}.{threading.get_ident()}.tmp"
        # A rename is atomic, so that a reader, which takes no lock, never sees half a value.
        written.unlink(missing_ok=True)
        with open(written, "wb", opener=lambda path, flags: open_own(path, flags, 0o666)) as file:
            file.write(value)
        written.replace(self._at(key))

    def _value(self, key: str) -> bytes | None:
        """Returns the value that a key has now; None: it has none."""
        try:
            return self._at(key).read_bytes()
        except FileNotFoundError:
            return None

    def _at(self, key: str) -> Path:
        return self.folder / _name(key)

    def _read(self, keys: Sequence[str], deadline: float) -> tuple[list[bytes | None], int]:
        return [self._value(key) for key in keys], 0

    def _watch(self, key: str, index: int, waited_s: float, limit_s: float) -> None:
        time.sleep(min(max(_SHORT_S, waited_s / 5), _LONG_S))


def _name(key: str) -> str:
    return f"={quote(key, safe='')}"
