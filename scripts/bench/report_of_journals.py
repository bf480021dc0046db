"""P14b: what `ft_launcher report` takes for the journals of a job of 30 days, as `long_journals.py` writes them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import long_journals
from .job import JobFailed
from .launchers import COMMON_ENVIRONMENT, ROOT, Launcher
from .scenario import Outcome

_LIMIT_S = 600.0
# The peak of a child's memory counts what it has before its exec, which is its parent's: this one is small.
_MEASURED = """
import json, resource, subprocess, sys, time
began = time.monotonic()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
wall_s, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def taken(launcher: Launcher, nodes: int, outcome: Outcome) -> None:
    """One report, by a fresh process; the journals are in the page cache."""
    words = [sys.executable, "-c", _MEASURED, launcher.python, "-m", launcher.module, "report", _journals(nodes).name]
    environment = {**os.environ, **COMMON_ENVIRONMENT, **launcher.environment}
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=_LIMIT_S, check=False
    )
    if done.returncode or done.stderr:
        raise JobFailed(f"the report of {nodes} nodes: {done.stderr[-1000:]}")
    code, wall_s, cpu_s, peak_mib = json.loads(done.stdout)
    if code:
        raise JobFailed(f"the report of {nodes} nodes ended with {code}")
    outcome.add("wall_s", wall_s)
    outcome.add("cpu_s", cpu_s)
    outcome.add("peak_mib", peak_mib)


@functools.cache
def _journals(nodes: int) -> tempfile.TemporaryDirectory[str]:
    """The journals of so many nodes, once for all repetitions; they are removed at the end of this process."""
    folder = tempfile.TemporaryDirectory(prefix="ftb")
    long_journals.write(Path(folder.name), long_journals.Job(nodes))
    return folder
