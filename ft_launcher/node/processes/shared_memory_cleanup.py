"""Removes what dead processes of this job left in /dev/shm: notes who was reaped, reads /proc, and removes the files.

`shared_memory.py` decides which files may be removed.

Threads: the agent's thread calls all methods of `SharedMemoryCleanup`. `begin`, between two cycles, only lists names in
the folder. If one has the pid of a reaped process, the thread `ft_shared_memory` does the rest, so that no restart
waits for a scan of /proc. `note` is called wherever an exit code is taken: on the agent's thread, and on the threads
that notify ranks of a loss. It only changes a dict, in operations that are atomic under the GIL.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ft_launcher.node.processes.process_tree import start_ticks
from ft_launcher.node.processes.shared_memory import (
    ProcessView,
    ReapedProcess,
    SharedFile,
    candidates,
    line_about,
    maker_of,
    removable,
)
from rank_monitor.contract.processes import proc

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
_INITIAL_PIDS = 4026531836
"""The inode of the first pid namespace: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h. Only from there are
all processes of the host visible. Nothing is removed in any other namespace: a process of another container may have
the same /dev/shm, and a file of it open."""
_MAX_NOTED = 1 << 16
"""Reaped processes that are remembered: those of a job that restarts for weeks must not fill the memory."""


class SharedMemoryCleanup:
    """The files in /dev/shm that processes of one launcher may have left.

    Args:
        is_on: whether anything is removed. False inside a user's program: it may be about to open a file whose name a
            rank has sent to it.
        folder: where the files are. Tests use another one.
    """

    def __init__(self, is_on: bool, folder: Path = FOLDER) -> None:
        self._is_on = is_on
        self._folder = folder
        self._began = time.time()
        self._ended: dict[int, ReapedProcess] = {}
        self._thread: threading.Thread | None = None
        self._has_removed = False

    def cycle_begins(self) -> None:
        """Notes that the ranks of a cycle are about to start: no process of the cycle has made a file earlier."""
        self._began = time.time()

    def note(self, pid: int) -> None:
        """Notes that the exit code of a process of the job was taken. Any thread."""
        self._ended.pop(pid, None)
        self._ended[pid] = ReapedProcess(self._began, time.time())
        if len(self._ended) > _MAX_NOTED:
            self._ended.pop(next(iter(self._ended)), None)

    def begin(self) -> None:
        """Starts the removal in a thread, if a file has a reaped process' pid in its name. Does not wait for it.

        Reads nothing but the names in the folder: this takes microseconds, and mostly nothing is to be removed.
        """
        self._has_removed = False
        if not self._is_on or (self._thread is not None and self._thread.is_alive()):
            return
        ended = dict(self._ended)
        with suppress(OSError):  # there may be no such folder
            if any(maker_of(name) in ended for name in os.listdir(self._folder)):  # noqa: PTH208 - names, not paths
                # A daemon: /proc waits for a process that holds its own memory map, and the launcher's end must not.
                self._thread = threading.Thread(
                    target=self._remove, args=(ended,), name="ft_shared_memory", daemon=True
                )
                self._thread.start()

    def settle(self, limit_s: float) -> bool:
        """Waits `limit_s` seconds at most for a removal that has begun.

        Called where the health check found /dev/shm full: what is being removed is no reason to leave the job.

        Returns:
            Whether something was removed since the last `begin`.
        """
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._has_removed

    def _remove(self, ended: dict[int, ReapedProcess]) -> None:
        """The thread's function: reads the files and all processes, and removes what `removable` returns."""
        found = candidates(_files(self._folder), ended, os.geteuid())
        if not found or Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PIDS:
            return
        removed = []
        for file in removable(found, list(_processes(found, self._folder.stat().st_dev))):
            path = self._folder / file.name
            with suppress(OSError):
                # A running process may have replaced the file under the same name since it was read.
                if path.lstat().st_ino == file.inode:
                    path.unlink()
                    removed.append(file)
        if removed:
            self._has_removed = True
            logger.warning("%s", line_about(removed))


def _files(folder: Path) -> Iterator[SharedFile]:
    """Yields the files with a library's name, directly in the folder."""
    for path in folder.iterdir():
        if maker_of(path.name) is not None:
            with suppress(OSError):
                found = path.lstat()
                size = found.st_blocks * 512  # stat(2)
                yield SharedFile(path.name, found.st_mode, found.st_uid, size, found.st_ino, found.st_ctime)


def _processes(files: list[SharedFile], device: int) -> Iterator[ProcessView]:
    """Yields every process that may have opened these files, all of which belong to this user.

    These are the user's own processes; for root the processes of all users. `device`: of the folder, as in stat(2).
    """
    names = {file.inode: file.name for file in files}
    uid = os.geteuid()
    for pid in proc.pids():
        status = proc.status(pid)
        if status and (uid == 0 or str(uid) in status.get("Uid", "").split()):
            if not status.get("State", "").startswith("Z"):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    yield ProcessView(pid, _held(pid, names, device), _sees(pid, status, device))
            elif status.get("Threads") == "1":
                yield ProcessView(pid)
            else:  # /proc shows no files of a process whose main thread alone has ended
                yield ProcessView(pid, holds=None)


def _held(pid: int, names: dict[int, str], device: int) -> frozenset[str] | None:
    """Returns the names of those files that a process has open or mapped; None: this cannot be read.

    Args:
        names: inode -> name of the files in question.
        device: of their folder; inodes of other devices mean other files.
    """
    try:
        mapped = re.findall(_in_maps(device), Path(f"/proc/{pid}/maps").read_bytes())
        held = {names[int(inode)] for inode in mapped if int(inode) in names}
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names, not paths
            with suppress(FileNotFoundError):  # closed since
                # By the name: to ask for the file's status could wait for a file server that does not answer.
                held.add(os.readlink(f"/proc/{pid}/fd/{name}").rpartition("/")[2])  # noqa: PTH115
    except PermissionError:
        # A process with more privileges, such as PID 1 or that of a login. If it is older than the launcher, it cannot
        # have inherited a file of this job.
        is_older = start_ticks(pid) < start_ticks(os.getpid())
        return frozenset() if is_older else None
    return frozenset(held)


def _sees(pid: int, status: dict[str, str], device: int) -> bool:
    """Returns `ProcessView.sees_folder` of a process. `status`: the fields of its /proc/PID/status."""
    if len(status.get("NSpid", "").split()) == 1:
        return False
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines()
    except OSError as error:
        # ENOENT and ESRCH: the process is gone. EINVAL: it has just ended, and is in no namespace any more.
        return error.errno not in (errno.ENOENT, errno.ESRCH, errno.EINVAL)
    return any(line.split()[2] == f"{os.major(device)}:{os.minor(device)}" for line in mounts)


def _in_maps(device: int) -> bytes:
    """Returns the pattern that matches the inode in a line of /proc/PID/maps, for files of one device."""
    return b" %02x:%02x ([0-9]+) " % (os.major(device), os.minor(device))
