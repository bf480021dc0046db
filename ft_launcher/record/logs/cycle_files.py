"""Writes the files per cycle that NVIDIA's launcher writes, for programs that watch a job from outside.

There are two kinds, each with an option of its own:

- `PREFIX_cycleN.log` (`--ft-per-cycle-applog-prefix`): what all ranks of a cycle print. All nodes append to one file.
- `cycle_info.JOB.ATTEMPT.CYCLE` (`--ft-cycle-info-dir`): a JSON object about a cycle, written by the node of rank 0.
  The link `cycle_info.JOB.current` points to the file of the running cycle.

Names, keys and forms are NVIDIA's, since their tools read the files: none may be changed here. Nothing here can end a
training: what cannot be written is logged.

Threads: `ft_log_pump` copies lines into the log of a cycle; `ft_cycle_info` writes the records. The agent's thread
calls the methods, which do not block, except `CycleInfo.close` (10 s at most) and the opening of a log.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ft_launcher.record.journal.access import opener_of_shared
from ft_launcher.record.logs.log_pump import LogPump, Stream, WrittenFiles
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.wire.foreign import read_json

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
"""Bytes of the buffer of a log. All nodes append to one file, and lines must stay whole: so a flush must nearly always
be one write."""
_LAST_WRITE_S = 10.0
"""Seconds that the job's end waits for a file system that hangs. NVIDIA's launcher waits as long."""
# Variables with the job's id. In a job array the id of the array counts, which all its tasks share.
_JOB_IDS = ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID")
# The variable that says how often Slurm has started the job again.
_ATTEMPT = "SLURM_RESTART_COUNT"


# The log of a cycle.


def application_log(prefix: str, cycle: int) -> Path:
    """Returns the path of a cycle's log: `PREFIX_cycleN.log`. An extension of the prefix replaces `.log`."""
    base, extension = os.path.splitext(os.path.abspath(prefix))  # noqa: PTH100, PTH122  (as text, as the peer does)
    return Path(f"{base}_cycle{cycle}{extension or '.log'}")


class ApplicationLog(LogPump):
    """Appends what the ranks of this node write to their files to the log of the cycle, each line with its rank before
    it. A full disk costs lines of this log, with one warning: the ranks' own files have them."""

    def __init__(self, file: TextIO, streams: Sequence[Stream]) -> None:
        super().__init__(streams)
        self._file = file
        self._failed = False

    def _copy_all(self, ended: bool = False) -> None:
        for stream in self._streams:
            try:
                stream.copy_new(self._has_room, ended)
            except (OSError, ValueError) as error:  # a full disk; what the ranks wrote stays in their own files
                if not self._failed:
                    logger.warning("the log of the cycle misses lines: %s: %s", self._file.name, error)
                self._failed = True

    def _run(self, written: WrittenFiles) -> None:
        try:
            super()._run(written)
        finally:
            # Closed in this thread: closing writes what is left, and the file system may not answer.
            with suppress(OSError):
                self._file.close()


def open_application_log(
    path: Path, envs: Mapping[int, Mapping[str, str]], *files: Mapping[int, str]
) -> ApplicationLog | None:
    """Opens the log of a cycle; returns None, with a warning, if it cannot be written. Blocks on the disk.

    Args:
        path: by `application_log`.
        envs: local rank -> environment of the rank; RANK and WORLD_SIZE are read.
        files: for each stream (stdout, stderr): local rank -> the file that the rank writes to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appends: each node of the cycle writes to this file.
        descriptor = opener_of_shared(str(path), os.O_WRONLY | os.O_APPEND)
        file = os.fdopen(descriptor, "a", _BUFFER_BYTES, encoding="utf-8")
    except OSError as error:
        logger.warning("the log of the cycle cannot be written: %s (--ft-per-cycle-applog-prefix)", error)
        return None
    streams = []
    for local_rank, environ in envs.items():
        width = len(str(int(environ["WORLD_SIZE"]) - 1))
        prefix = f"{environ['RANK']:>{width}}: "
        paths = [of[local_rank] for of in files if of.get(local_rank)]
        streams += [Stream(name, prefix, file, lambda line: True) for name in paths]
    return ApplicationLog(file, streams)


# The record of a cycle.


def job_id(settings: RecordSettings, environ: Mapping[str, str]) -> str:
    """Returns the job's id in names of files: the user's, else Slurm's; empty without either, as in NVIDIA's
    launcher."""
    found = settings.cycle_info_job_id or next((environ[name] for name in _JOB_IDS if environ.get(name)), "")
    # The two characters that a file name cannot have.
    return re.sub(r"[/\0]", "_", found)


def current_info(settings: RecordSettings, environ: Mapping[str, str]) -> Path | None:
    """Returns the path of the link to the running cycle's file; None: no such files are written. The ranks get the path
    in their environment."""
    if not settings.cycle_info_dir:
        return None
    return Path(settings.cycle_info_dir).absolute() / f"cycle_info.{job_id(settings, environ)}.current"


def node_list(names: Sequence[str]) -> str:
    """Returns host names as Slurm writes them: `n[01-03,07]`. If a name does not end in a number, a plain list of
    all."""
    found = [(match[1], match[2]) for match in map(_numbered, names) if match]
    if len(found) < len(names):
        return ",".join(sorted({_short(name) for name in names}))
    parts = []
    for base in sorted({base for base, _ in found}):
        digits = {int(number): number for of, number in found if of == base}
        width = max(map(len, digits.values()))
        parts.append(f"{base}[{_ranges(sorted(digits), width)}]")
    return ",".join(parts)


def rank_list(names: Sequence[str]) -> str:
    """Returns the ranks of these nodes as ranges (`0-2,5`), in the order of `node_list`; `names` is ordered by rank."""
    return _ranges(sorted(range(len(names)), key=lambda rank: _order(names[rank])))


def _short(name: str) -> str:
    return name.partition(".")[0]


def _numbered(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(.*?)(\d+)", _short(name))


def _order(name: str) -> tuple[int, str, int]:
    match = _numbered(name)
    if match:
        return (0, match[1], int(match[2]))
    return (1, _short(name), 0)


def _ranges(numbers: Sequence[int], width: int = 1) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join("-".join(f"{end:0{width}}" for end in dict.fromkeys((run[0], run[-1]))) for run in runs)


class CycleInfo:
    """Writes the records of the cycles in which this node has rank 0, in a thread, since the folder may be on a slow
    disk. Does nothing without `--ft-cycle-info-dir`."""

    def __init__(self, settings: RecordSettings, environ: Mapping[str, str]) -> None:
        self._current = current_info(settings, environ)
        self._prefix = settings.per_cycle_applog_prefix
        attempt = environ.get(_ATTEMPT, "0")
        self._facts = {"job_id": job_id(settings, environ), "attempt_index": 0}
        if attempt.isdigit():
            self._facts["attempt_index"] = int(attempt)
        self._record: dict[str, Any] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, cycle: int, active: Sequence[str], standby: Sequence[str]) -> None:
        """Has the record of a cycle written that begins. Does not block.

        Args:
            active: the host names of its nodes, in the order of node ranks; empty where they are not known.
            standby: the host names of the nodes that wait as spares.
        """
        if self._current is None:
            return
        log_file = ""
        if self._prefix:
            log_file = str(application_log(self._prefix, cycle))
        self._record = {
            **self._facts,
            "cycle_number": cycle,
            "cycle_start_time": _now(),
            "cycle_end_time": "",
            "cycle_log_file": log_file,
            "active_nodes": node_list(active),
            "standby_nodes": node_list(standby),
            # Text, as in NVIDIA's records. Each later write of the record increases it by one.
            "generation": "0",
            "active_ranks": rank_list(active),
        }
        self._do(partial(_create, self._current, self._record))

    def end(self) -> None:
        """Has the end of the cycle written into its record. Does not block; a second call does nothing."""
        if self._record and self._current is not None:
            record, self._record = self._record, {}
            self._do(partial(_end, self._current, record, _now()))

    def close(self) -> None:
        """Ends the present record, and waits until all is written: for `_LAST_WRITE_S` at most."""
        self.end()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_LAST_WRITE_S)
            self._thread = None

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, daemon=True, name="ft_cycle_info")
            self._thread.start()
        self._work.put(work)

    def _write(self) -> None:
        for work in iter(self._work.get, None):
            try:
                work()
            except (OSError, ValueError) as error:
                logger.warning("the file of the cycle cannot be written: %s (--ft-cycle-info-dir)", error)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _create(current: Path, record: Mapping[str, Any]) -> None:
    current.parent.mkdir(parents=True, exist_ok=True)
    _end_previous(current, record)
    file = _file_of(current, record)
    _put(file, record)
    # The link is replaced by a rename, so that a reader never finds it missing.
    link = current.with_name(current.name + ".tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(file.name)
    link.replace(current)


def _end_previous(current: Path, record: Mapping[str, Any]) -> None:
    """Writes the end of the cycle before into its record, if it is missing: the node that had rank 0 then may have been
    lost."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no file, or none of ours
        previous = read_json(current, follow_link=True)
        mine = all(previous.get(key) == record[key] for key in ("job_id", "attempt_index"))
        if mine and previous["cycle_number"] < record["cycle_number"] and not previous["cycle_end_time"]:
            _end(current, previous, record["cycle_start_time"])


def _end(current: Path, record: Mapping[str, Any], moment: str) -> None:
    generation = str(int(record["generation"]) + 1)
    _put(_file_of(current, record), {**record, "cycle_end_time": moment, "generation": generation})


def _file_of(current: Path, record: Mapping[str, Any]) -> Path:
    return current.with_name(f"cycle_info.{record['job_id']}.{record['attempt_index']}.{record['cycle_number']}")


def _put(file: Path, record: Mapping[str, Any]) -> None:
    """Replaces a file in one step by a rename, since readers may open it at any moment."""
    whole = file.with_name(file.name + ".tmp")
    # A launcher that was killed, or another user, may have left a file of that name.
    whole.unlink(missing_ok=True)
    with open(whole, "w", encoding="utf-8", opener=opener_of_shared) as written:
        written.write(json.dumps(record, indent=2))
    whole.replace(file)
