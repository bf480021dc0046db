"""The files of a run: its folder, torch's `LogsSpecs` for the ranks' output, and what the recorder keeps there.

    <log_dir>/<name>-<start>/journal.NODE.jsonl
    <log_dir>/<name>-<start>/cycle_N/<local_rank>/stdout.log, stderr.log, error.json, stacks.txt

Without `--log-dir` the folder is made below a default parent, once there is something to keep, and all but the newest
20 runs there are removed at the job's end. A folder that the user named is never cleaned up, and files of earlier
cycles are never touched. What cannot be kept is said once, and training goes on.

Threads: all work on the disk is done by the file thread (`file_thread.py`), once ranks run. The methods here may be
called by any thread; they wait for it for a second or so at most, and go on without the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeAlias

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std, to_map

from ft_launcher.record.journal.access import Access
from ft_launcher.record.journal.file_thread import FileThread, NoAnswer
from ft_launcher.record.journal.journal import Journal
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.wire.foreign import read_file

logger = logging.getLogger(__name__)

MAX_KEPT = 4 << 20
"""Bytes kept of a file that a rank wrote, the last ones. That is over 100 dumps of the stacks of a rank with 100
threads."""

StdMap: TypeAlias = Std | dict[int, Std]
# torch's value for a stream that is inherited.
_CONSOLE = ""
KEPT_RUNS = 20
"""Runs that stay below a default parent."""
_LOCK = "launcher.lock"
"""A file in the folder of a run that its launcher locks while it lives. The kernel releases the lock however the
launcher ends, so a locked folder is never pruned."""
_STACKS = "stacks.txt"
_PRUNE_S = 5.0
"""Seconds to wait at the job's end, while the files of an old run are removed."""
_COPY_S = 1.0
"""Seconds to wait for a copy, or for the folder of the run. Where the disk does not answer, both are made later."""
_RANKS_FILES_S = 10.0
"""Seconds to wait for the files that ranks print to. A file server takes a few seconds to make those of 1,000 ranks."""


def default_parents(environ: Mapping[str, str]) -> list[Path]:
    """Returns the folders in which a run's folder may be made without `--log-dir`, best first: below XDG_STATE_HOME, if
    it is set, then below temporary folders."""
    state = environ.get("XDG_STATE_HOME", "")
    # By the specification of XDG, a relative path is invalid and is ignored.
    if Path(state).is_absolute():
        parents = [Path(state) / "ft_launcher"]
    else:
        parents = []
    name = f"ft_launcher-{os.geteuid()}"
    return [*parents, *(Path(folder).absolute() / name for folder in runtime_folder.parents(environ))]


class RunFolder:
    """The folder of one run of the launcher.

    Args:
        log_dir: `--log-dir`: the folder of the run is made in it at once. None: it is made below a default parent, by
            the first call of `make`.
        name: the job's name, for the name of the folder.
        access: who may read what is in the folder; None: this user alone.
        files: the file thread of the job; None: a new one.

    Raises:
        ConfigError: a folder in `log_dir` cannot be made.
    """

    def __init__(
        self, log_dir: str | None, name: str, access: Access | None = None, files: FileThread | None = None
    ) -> None:
        self.access = access or Access()
        self.files = files or FileThread()
        self.asked_for = log_dir is not None
        self._name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name) or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        if log_dir is not None:
            self._parents = [Path(log_dir).absolute()]
        else:
            self._parents = default_parents(os.environ)
        self._lock = -1
        self.path = self._parents[0] / self._name
        """The path of the folder, which may not exist yet."""
        self.exists = False
        if self.asked_for:
            self.make()

    def make(self) -> Path:
        """Makes the folder, if it does not exist, and returns its path. Blocks on the disk: once ranks run, only the
        file thread may call it.

        Raises:
            ConfigError: no folder can be made in any of the parents.
        """
        if self.exists:
            return self.path
        errors = []
        for parent in self._parents:
            try:
                self.path = parent / self._name
                self._make_below(parent)
                return self.path
            except OSError as error:
                errors.append(error.strerror or str(error))
        hint = "Name a folder that can be written"
        if self.asked_for:
            source = "--log-dir"
        else:
            source = "the default"
        raise ConfigError("log_dir", str(self._parents[0]), source, errors[0], hint)

    def _make_below(self, parent: Path) -> None:
        if self.asked_for:
            self.access.make_folder(parent)
        else:
            _make_private(parent)
            if self.access.group:
                self.access.limit(parent)
        for number in itertools.count(2):  # launchers in containers on a shared disk have the same pids
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
                self.access.limit(self.path)
                break
            self.path = parent / f"{self._name}-{number}"
        self.exists = True
        if not self.asked_for:
            self._lock = _lock(self.path / _LOCK)

    def of_rank(self, cycle: int, local_rank: int) -> Path:
        """Returns the folder of a rank in a cycle; makes it if it is missing. Blocks on the disk, as `make` does."""
        folder = self.make() / f"cycle_{cycle}" / str(local_rank)
        self.access.make_folder(folder)
        return folder

    def close(self) -> None:
        """Ends the run. Below a default parent, removes old runs whose launcher has ended. Blocks for 5 s at most."""
        with contextlib.suppress(NoAnswer):
            self.files.call(self._close, _PRUNE_S)

    def _close(self) -> None:
        if self.exists and not self.asked_for:
            _prune(self.path.parent)
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def _make_private(folder: Path) -> None:
    """Makes a folder that only this user can write to, if it does not exist.

    In /tmp another user may have made a folder or a link of that name, to read or to replace what is written there.

    Raises:
        OSError: the folder cannot be made, or belongs to somebody else.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    # `lstat`: a link of that name may be another user's.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user can write to")


def _lock(path: Path) -> int:
    """Makes and locks a file; returns its descriptor, which holds the lock while it is open. -1: the file cannot be
    made."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    with contextlib.suppress(OSError):  # a file system without locks: `_prune` cannot lock it either, and leaves it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _prune(parent: Path) -> None:
    """Removes all runs but the newest `KEPT_RUNS`. Runs that are locked stay, since their launcher lives, and so do
    folders without a lock file, which nobody can tell to be a run's."""
    ages = []
    for lock in parent.glob(f"*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another launcher removes it just now
            ages.append((lock.stat().st_mtime_ns, lock))
    for _, lock in sorted(ages, reverse=True)[KEPT_RUNS:]:
        descriptor = -1
        try:
            # O_NOFOLLOW, and the lock is tried: a launcher that lives still writes here.
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # With the lock in hand: two launchers that end at once do not remove the same folder.
            shutil.rmtree(lock.parent)
        except BlockingIOError:
            continue
        except OSError as error:
            logger.info("the folder of an old run cannot be removed: %s", error)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


class KeptFiles:
    """What the recorder keeps of a run: the journal, and copies of files that ranks wrote.

    The run's folder is made, and the journal opened, at the first thing worth keeping (`begin`). With a log folder, a
    folder for the journal, or a port for the status page, the journal is kept from the start.

    Args:
        run: the folder of the run.
        settings: where the journal goes instead, how large it may become, and who may read it.
    """

    def __init__(self, run: RunFolder, settings: RecordSettings) -> None:
        self._files = run.files
        self.thread = run.files
        """The file thread, for others that read or write in the user's folders."""
        self.journal = Journal(settings.journal_max_mb, run.files)
        self.node = socket.gethostname()
        self._run = run
        self._failed = False
        self._folder: Path | None = None
        if settings.journal_dir:
            self._folder = Path(settings.journal_dir)
        asked_at = settings.metrics_port is not None or settings.status_port is not None
        if settings.journal_dir or asked_at:
            self.begin()
        self.follow_run()

    def follow_run(self) -> None:
        """Opens the journal if the run's folder exists already, since it was made for the output of the ranks."""
        if self._run.exists:
            self.begin()

    def begin(self) -> None:
        """Makes the run's folder and opens the journal: from now on there is something to keep. Blocks for two seconds
        at most; a second call does nothing. Where the folder cannot be made, that is said once."""
        if self._failed or self.journal.path is not None:
            return
        try:
            if self._folder is not None:
                folder = self._folder
            else:
                folder = self._files.call(self._run.make, _COPY_S)
        except NoAnswer:
            return
        except ConfigError as error:
            self._failed = True
            logger.warning("nothing can be kept of this run: %s", error)
            return
        self.journal.open(folder / f"journal.{self.node}.jsonl", self._run.access)

    def copy(self, cycle: int, local_rank: int, file: Path, name: str) -> str:
        """Copies the last part of a rank's file to the rank's log folder as `name`. Blocks for two seconds or so at
        most.

        Returns:
            The path of the copy; empty: the file is empty or cannot be read, or the copy cannot be written in time.
        """
        self.begin()
        try:
            return self._files.call(partial(self._copy, cycle, local_rank, file, name), _COPY_S)
        except NoAnswer:
            return ""

    def _copy(self, cycle: int, local_rank: int, file: Path, name: str) -> str:
        try:
            # Of a long file the end is kept: the last stacks are the ones that explain the end of the rank.
            content = read_file(file, MAX_KEPT, tail=True)
        except OSError:
            return ""
        if not content or self._failed:
            return ""
        return self._write(cycle, local_rank, name, content)

    def copy_stacks(self, cycle: int, local_rank: int, stack_file: Path) -> str:
        """Copies the file with a rank's stacks to its log folder; returns the path of the copy, empty: there is
        none."""
        return self.copy(cycle, local_rank, stack_file, _STACKS)

    def write_stacks(self, cycle: int, local_rank: int, text: str) -> str:
        """Writes the traceback of a rank that ended without stacks to where its stacks would be; returns the path,
        empty: it cannot be written."""
        content = text.encode(errors="backslashreplace")
        try:
            return self._files.call(partial(self._write, cycle, local_rank, _STACKS, content), _COPY_S)
        except NoAnswer:
            return ""

    def _write(self, cycle: int, local_rank: int, name: str, content: bytes) -> str:
        try:
            path = self._run.of_rank(cycle, local_rank) / name
            with open(path, "wb", opener=self._run.access.opener) as file:
                file.write(content)
        except (OSError, ConfigError):
            return ""
        return str(path)


class CycleLogs(LogsSpecs):  # type: ignore[misc]
    """torch's `LogsSpecs`: says for each cycle where the output and the error file of each rank go.

    torch's own class makes a folder for each attempt of its own numbering, and needs a log folder. This class names
    folders by cycle, the same number on all nodes, and puts error files into the runtime folder without `--log-dir`.

    Args:
        run: the folder of the run.
        runtime: the runtime folder of the launcher, which is removed at its end.
        redirects, tee, local_ranks_filter: as in torch.
    """

    def __init__(
        self, run: RunFolder, runtime: Path, redirects: StdMap, tee: StdMap, local_ranks_filter: set[int] | None
    ) -> None:
        super().__init__(str(run.path), redirects, tee, local_ranks_filter)
        self._run = run
        self._runtime = runtime

    @property
    def root_log_dir(self) -> str:
        """The folder in which the run's folder is made."""
        return str(self._run.path.parent)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """torch's hook: returns the destinations of a cycle and sets TORCHELASTIC_ERROR_FILE of each rank.

        Where the disk of the logs does not answer, the ranks print to the console instead: they would stand still at
        their first line.
        """
        if not self._goes_to_files(len(envs)):
            return self._destinations(envs, False, False)
        # If the disk does not answer, the task is left behind and goes on later. So it works on copies of the
        # environments, since ranks run by then, and stops at a mark, so as not to make files that no rank writes to.
        completed, is_given_up = {local_rank: dict(rank_env) for local_rank, rank_env in envs.items()}, Event()
        make = partial(self._destinations, completed, self._run.asked_for, True, is_given_up)
        try:
            dest = self._run.files.call(make, _RANKS_FILES_S)
        except NoAnswer:
            is_given_up.set()
            logger.warning("the folder of the logs does not answer: the ranks of this cycle print to the console")
            return self._destinations(envs, False, False)
        for local_rank, rank_env in completed.items():
            envs[local_rank].update(rank_env)
        return dest

    def _goes_to_files(self, ranks: int) -> bool:
        tee, redirects = to_map(self._tee, ranks), to_map(self._redirects, ranks)
        return self._run.asked_for or any((*tee.values(), *redirects.values()))

    def _destinations(
        self, envs: dict[int, dict[str, str]], is_kept: bool, may_go_to_files: bool, is_given_up: Event | None = None
    ) -> LogsDest:
        """Makes the folders and files of a cycle and returns them as `reify` does. Blocks on the disk.

        Args:
            is_kept: error files go to the folder of the run; False: to the runtime folder, unless output goes to files.
            may_go_to_files: False: all output goes to the console.
            is_given_up: set when the caller does not wait any more.

        Raises:
            NoAnswer: `is_given_up` was set meanwhile.
        """
        dest = LogsDest()
        # torch passes no cycle; the number is the same on all nodes.
        cycle = int(next(iter(envs.values())).get("TORCHELASTIC_RESTART_COUNT", "0"))
        tee, redirects = to_map(self._tee, len(envs)), to_map(self._redirects, len(envs))
        if may_go_to_files:
            to_files = {local_rank: redirects[local_rank] | tee[local_rank] for local_rank in envs}
        else:
            to_files, tee = dict.fromkeys(envs, Std.NONE), dict.fromkeys(envs, Std.NONE)
        if is_kept or any(to_files.values()):
            parent = self._run.make()
        else:
            parent = self._runtime
        folder = parent / f"cycle_{cycle}"
        for local_rank, rank_env in envs.items():
            if is_given_up is not None and is_given_up.is_set():
                raise NoAnswer("nobody waits for these files any more")
            of_rank = folder / str(local_rank)
            self._run.access.make_folder(of_rank)
            self._add_streams(dest, of_rank, local_rank, to_files[local_rank], tee[local_rank])
            dest.error_files[local_rank] = rank_env["TORCHELASTIC_ERROR_FILE"] = str(of_rank / "error.json")
        dest.filtered_stdout = str(folder / "filtered_stdout.log")
        dest.filtered_stderr = str(folder / "filtered_stderr.log")
        return dest

    def _add_streams(self, dest: LogsDest, folder: Path, local_rank: int, to_file: Std, tee: Std) -> None:
        """Adds where the two streams of a rank go: a file, the console, or nowhere (a rank that is filtered out)."""
        shown = not self._local_ranks_filter or local_rank in self._local_ranks_filter
        for std, files, tees, name in (
            (Std.OUT, dest.stdouts, dest.tee_stdouts, "stdout.log"),
            (Std.ERR, dest.stderrs, dest.tee_stderrs, "stderr.log"),
        ):
            if to_file & std:
                files[local_rank] = str(folder / name)
                self._run.access.create(folder / name)
            elif shown:
                files[local_rank] = _CONSOLE
            else:
                files[local_rank] = os.devnull
            if tee & std and shown:
                tees[local_rank] = files[local_rank]
