"""File modes of what the launcher writes, and only to files of its own user: logs contain paths, arguments and data of
the training.

Used by `journal.py`, `logs.py`, `recorder.py`, and `composition.py` for the log file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.wire.own_file import open_own


@dataclass(frozen=True)
class Access:
    """The user alone (0600 in 0700 folders), or with `group` the user's group too, for reading (0640 in 0750)."""

    group: bool = False

    @property
    def folder_mode(self) -> int:
        """The mode of each folder that is made."""
        if self.group:
            return 0o750
        return 0o700

    @property
    def file_mode(self) -> int:
        """The mode of each file that is written."""
        if self.group:
            return 0o640
        return 0o600

    def make_folder(self, path: Path) -> None:
        """Makes a folder and its missing parents. Folders that exist keep their mode.

        Raises:
            OSError: it cannot be made.
        """
        for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            with contextlib.suppress(FileExistsError):  # another node makes it just now
                folder.mkdir()
                self.limit(folder)
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is not a folder")

    def limit(self, folder: Path) -> None:
        """Sets the mode of a folder that was just made, whatever the umask is.

        Raises:
            OSError: it is gone, or something else has taken its place.
        """
        # By descriptor: in a folder that others may write to, a link may have taken the place of `folder`.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with contextlib.suppress(PermissionError):  # a file system that has no modes
                os.fchmod(descriptor, self.folder_mode)
        finally:
            os.close(descriptor)

    def opener(self, path: str, flags: int) -> int:
        """An opener for `open(..., "w")`: does not block, writes only to this user's files, and sets the file's mode.

        Raises:
            OSError: it cannot be opened, or is no file of this user (`own_file.py`).
        """
        descriptor = open_own(path, flags, self.file_mode)
        with contextlib.suppress(PermissionError):  # a file system that has no modes
            os.fchmod(descriptor, self.file_mode)
        return descriptor

    def create(self, path: Path) -> None:
        """Makes a file that another process will write. Anything but a regular file in its place is removed.

        Raises:
            OSError: it cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
        with open(path, "ab", opener=self.opener):
            pass


def opener_of_shared(path: str, flags: int) -> int:
    """An opener as `Access.opener`, for files that programs of others read: the umask says who may.

    Raises:
        OSError: it cannot be opened, or is no file of this user.
    """
    return open_own(path, flags, 0o666)
