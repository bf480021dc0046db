"""Waits until the standalone agents, which watch wrapped ranks without a launcher, have ended. It ends none of them.

For batch scripts. At the end of a script the batch system kills what is left of the job; a standalone agent that still
writes its log, or ends a rank that hangs, must not be cut off. Name and options are those of NVIDIA's module.

    python -m ft_client.inprocess.wait_daemon PIDFILE
    python -m ft_client.inprocess.wait_daemon --monitor-process-logfile=PATH -- python train.py ...

The first form waits for the standalone agent of a pid file. Its exit code is 1 when there was none, else 0. The second
form runs a command, then waits for the standalone agents that write to the log file, if there are any. Its exit code is
the command's.

In both, `{rank}` stands for any number, and only processes of this machine count. Variables that no shell has replaced,
as in '/logs/${SLURM_PROCID}.log', are replaced here.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rank_monitor.contract.exit_codes import died_of
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable

PROCESS_NAME = "ft_companion"
"""The name of a standalone agent in `ps`, by which it is told from another process with a recycled pid."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the command: those by which users and batch systems end a job, or warn it."""
_NOT_FOUND = 127
"""The exit code where the command cannot be started, as of a shell that does not find it."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line that the module describes. Returns the exit code.

    Args:
        arguments: of the command line, without the program.
    """
    own, command = _split(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m ft_client.inprocess.wait_daemon",
        usage="%(prog)s (PIDFILE | --monitor-process-logfile PATH -- COMMAND ...)",
    )
    parser.add_argument("pidfile", nargs="?")
    parser.add_argument("--monitor-process-logfile", "--monitor_process_logfile", dest="logfile")
    options = parser.parse_args(own)
    if (options.pidfile is None) == (options.logfile is None) or (options.logfile is None) == bool(command):
        parser.error("give either PIDFILE, or --monitor-process-logfile and a command behind --")
    if command:
        return _after(command, options.logfile)
    return _wait_for_pids(options.pidfile)


def _wait_for_pids(path: str) -> int:
    """Waits for the standalone agents of the pid files under `path`. Returns the exit code."""
    files = _matching(path)
    if not _pids_in(files):
        return 1
    while _wait_for(_pids_in(files)):
        pass  # a standalone agent that was lost may have been replaced meanwhile
    return 0


def _after(command: Sequence[str], path: str) -> int:
    """Runs a command, then waits for the standalone agents that write to `path`. Returns the command's exit code."""
    code = _run(command)
    while _wait_for(_writers(_matching(path))):
        pass  # a standalone agent that was lost may have been replaced meanwhile
    return code


def _run(command: Sequence[str]) -> int:
    """Runs a command, to which the signals that this process gets are passed on. Blocks. Returns its exit code.

    Signals that come before the command has started are kept, and passed on then.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # the command inherits an ignored signal as ignored
            signal.signal(number, forward)
    try:
        process = subprocess.Popen(command)
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr)
        return _NOT_FOUND
    for sent in early:
        process.send_signal(sent)
    code = process.wait()
    if code < 0:
        return died_of(-code)
    return code


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the arguments before `--`, and those after it."""
    if "--" in arguments:
        place = list(arguments).index("--")
    else:
        place = len(arguments)
    return arguments[:place], arguments[place + 1 :]


def _matching(path: str) -> list[Path]:
    """Returns the files that exist under this name, where `{rank}` is any number."""
    path = os.path.expandvars(path.replace("\\$", "$"))  # one quote too many in a batch script leaves `\${NAME}`
    form = re.compile(r"\d+".join(re.escape(part) for part in path.split("{rank}")))
    found = glob.glob(glob.escape(path).replace("{rank}", "*"))  # noqa: PTH207 (a Path cannot be a pattern)
    return [Path(name) for name in found if form.fullmatch(name)]


def _pids_in(files: Iterable[Path]) -> set[int]:
    """Returns the pids in those of the files that hold one."""
    found = set()
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            found.add(int(file.read_text()))
    return found - {0}


def _writers(files: Iterable[Path]) -> set[int]:
    """Returns the pids of the standalone agents that have one of the files open."""
    wanted, found = set(), set()
    for file in files:
        with contextlib.suppress(OSError):  # removed meanwhile
            stat = file.stat()
            wanted.add((stat.st_dev, stat.st_ino))
    for pid in proc.pids():
        if _is_standalone_agent(pid) and not wanted.isdisjoint(_open_files(pid)):
            found.add(pid)
    return found


def _open_files(pid: int) -> Iterator[tuple[int, int]]:
    """Yields device and inode of each file that a process has open."""
    for descriptor in proc.descriptors_of(pid):
        with contextlib.suppress(OSError):  # closed meanwhile
            stat = Path(f"/proc/{pid}/fd/{descriptor}").stat()
            yield stat.st_dev, stat.st_ino


def _wait_for(pids: Iterable[int]) -> bool:
    """Blocks until all standalone agents with these pids have ended. Returns whether one had not ended before."""
    waited = False
    for pid in pids:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if _is_standalone_agent(pid) and not readable([pidfd], 0.0):
                    readable([pidfd], None)
                    waited = True
            finally:
                os.close(pidfd)
    return waited


def _is_standalone_agent(pid: int) -> bool:
    """Returns whether a process is a standalone agent."""
    return proc.name_of(pid) == PROCESS_NAME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
