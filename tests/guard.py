"""Ends what tests started when their pytest ends without doing so: by SIGKILL, by its limit of time, by an error.

    python -m tests.guard PYTEST_PID MARK FOLDER

Each process of pytest, xdist's workers too, starts one of these beside itself, and sets MARK in its own environment,
which all that tests start inherits: launchers, ranks, the daemons of a Slurm cluster, servers of file systems. When
pytest has ended, however that came, the guard kills every process with the mark and unmounts what is mounted below
FOLDER. It has no mark of its own, and is in a session of its own, so that whatever ends pytest spares it. A process
with a cleared environment is not found; one that only the mark of another pytest has, which a test started, is ended by
that one's guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
import uuid
from pathlib import Path

from rank_monitor.contract.processes import sweep
from tests.program import ROOT

MARK = "TESTS_OF_PYTEST"
"""The variable. Its name has none of the beginnings that `program.clean_environment` leaves out."""
_QUIET_S = 0.5
"""For a process that is being started: during its exec it has no environment."""
_LIMIT_S = 60.0
_LOOK_AGAIN_S = 0.01

_guards: list[subprocess.Popen[bytes]] = []
"""Kept, since nobody waits for them: they outlive this process by a moment."""


def watch_over_this_process(folder: Path) -> None:
    """Starts the guard of this process, and marks all that is started from now on.

    Args:
        folder: where this process' tests mount file systems.
    """
    without = {name: value for name, value in os.environ.items() if name != MARK}
    mark = uuid.uuid4().hex
    nowhere = subprocess.DEVNULL
    _guards.append(
        subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.guard", str(os.getpid()), mark, str(folder)],
            cwd=ROOT,
            env=without,
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        )
    )
    os.environ[MARK] = mark


def main() -> None:
    """Waits for the end of pytest, then ends what it left."""
    pid, mark, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with contextlib.suppress(ProcessLookupError):
        pytest_process = os.pidfd_open(pid)
        if os.getppid() == pid:  # else it has ended, and the pid is another's
            select.select([pytest_process], [], [])
    kill_all(mark)
    unmount_below(folder)


def kill_all(mark: str) -> None:
    """Kills every process with the mark, and what they start meanwhile, until none is found for a while."""
    deadline = time.monotonic() + _LIMIT_S
    quiet_until = time.monotonic() + _QUIET_S
    while time.monotonic() < min(deadline, quiet_until):
        for pid in sweep.processes_of(mark, key=MARK):
            sweep.kill(pid, mark, key=MARK)
            quiet_until = time.monotonic() + _QUIET_S
        time.sleep(_LOOK_AGAIN_S)


def unmount_below(folder: str) -> None:
    """Unmounts all that is mounted below a folder in this mount namespace, the last mount first."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [line.split()[4].decode("unicode_escape") for line in lines]  # a space is \040
    for point in reversed(points):
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", point], check=False)


if __name__ == "__main__":
    main()
