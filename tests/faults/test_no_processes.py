"""A limit of processes is reached, at the launcher's start or at a restart: one line says so, without traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests.faults.conftest import StartJob
from tests.faults.job import Place
from tests.faults.training import Plan
from tests.nodes.conftest import require
from tests.program import clean_environment, run

# The limit counts the processes of one user, and root has none: a user that nobody else has, who may read these files.
USER = 1 << 20 | os.getpid()
AS_USER = (
    "setpriv",
    f"--reuid={USER}",
    "--clear-groups",
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override",
    "--",
)
SCRIPT = """
import os, resource, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                resource.prlimit(int(name), resource.RLIMIT_NPROC, (1, 1))
        except OSError:
            pass
    sys.exit(3)
"""
LIMITED = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); "
REFUSED = "the system refused: no process or thread can be started: a limit of processes is reached (ulimit -u"


def start_as_user(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*AS_USER, *words], **more)


@pytest.fixture(autouse=True)
def _limited() -> None:
    limited = run([*AS_USER, sys.executable, "-c", LIMITED + "os.fork()"])
    if "BlockingIOError" not in limited.stderr:
        require("this user cannot be limited")


@pytest.fixture
def script() -> Iterator[Path]:
    """A script where that user can read it: access(2) does not count what the user may do otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "script.py"
        file.write_text(SCRIPT)
        yield file


@pytest.mark.parametrize("start", ["auto", "off"])
def test_at_a_restart(start_job: StartJob, script: Path, start: str) -> None:
    flags = ("--max-restarts=1", f"--ft-warm-start={start}")
    job = start_job(Plan(), 2, *flags, script=script, place=Place(start=start_as_user))
    assert job.finish() == ExitCode.LAUNCHER_ERROR, job.tail()
    assert REFUSED in job.output and "Traceback" not in job.output, job.tail()
    assert REFUSED in job.journal("job_end")[-1]["reason"], job.tail()


@pytest.mark.parametrize("start", ["auto", "off"])
def test_at_the_start(tmp_path: Path, start: str) -> None:
    words = (sys.executable, "-m", "ft_launcher", f"--ft-warm-start={start}", "--no-python", "true")
    limited = (sys.executable, "-c", LIMITED + "os.execv(sys.argv[1], sys.argv[1:])")
    environ = clean_environment(TMPDIR=str(tmp_path))
    done = run([*AS_USER, *limited, *words], folder=tmp_path, environ=environ)
    assert done.returncode == ExitCode.LAUNCHER_ERROR, done.stderr
    assert REFUSED in done.stderr and "Traceback" not in done.stderr, done.stderr
