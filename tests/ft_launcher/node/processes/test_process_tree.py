"""Whole trees end, wherever they went; a process that only acts as launcher here starts and stops them."""

from __future__ import annotations

import json
import os
import secrets
import textwrap
from typing import Any

import pytest

from tests.program import python

LAUNCHER = """
import json, os, subprocess, sys, time
from ft_launcher.node.processes.process_tree import ProcessTree, become_subreaper
from rank_monitor.contract import env

become_subreaper()
rank_source, limit_s, adopt, tag = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "adopt", sys.argv[4]
kept = subprocess.Popen(["sleep", "600"])
rank = subprocess.Popen(
    [sys.executable, "-c", rank_source],
    env=dict(os.environ, **{env.JOB_TAG: tag}),
    stdout=subprocess.PIPE,
    start_new_session=True,
)
pids = json.loads(rank.stdout.readline())
started = time.monotonic()
ending = ProcessTree(tag, {rank.pid}, {kept.pid}, adopt).stop(15, limit_s)
took = time.monotonic() - started
def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
print(json.dumps({
    "rank": rank.wait(), "left": [pid for pid in pids if alive(pid)], "kept": alive(kept.pid),
    "killed": len(ending.killed), "not_ended": len(ending.left), "over": took - limit_s,
}))
kept.kill()
"""

PLAIN = "import json, os, time; print(json.dumps([os.getpid()]), flush=True); time.sleep(600)"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PLAIN
STOPPED = "import json, os, signal; print(json.dumps([os.getpid()]), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
FAMILY = """
import json, os, subprocess, sys, time
sleeper = "import time; time.sleep(600)"
same = subprocess.Popen([sys.executable, "-c", sleeper])
session = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
daemon = int(subprocess.run(
    [sys.executable, "-c", '''
import os, subprocess, sys
nowhere = subprocess.DEVNULL
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env=ENV, stdout=nowhere, stderr=nowhere)
print(child.pid)
'''.replace("ENV", ENV)], capture_output=True, text=True).stdout)
print(json.dumps([os.getpid(), same.pid, session.pid, daemon]), flush=True)
time.sleep(600)
"""
TAGGED_DAEMON = "ENV = 'dict(os.environ)'\n" + FAMILY
CLEAN_DAEMON = "ENV = '{}'\n" + FAMILY


def stop(rank_source: str, limit_s: float = 30.0, adopt: str = "adopt") -> dict[str, Any]:
    source = textwrap.dedent(rank_source)
    done = python(LAUNCHER, source, str(limit_s), adopt, secrets.token_hex(8), limit_s=120)
    found: dict[str, Any] = json.loads(done.stdout)
    for pid in found["left"]:
        os.kill(pid, 9)
    return found


@pytest.mark.parametrize(
    ("source", "adopt"),
    [(PLAIN, "adopt"), (STOPPED, "adopt"), (TAGGED_DAEMON, "adopt"), (CLEAN_DAEMON, "adopt"), (TAGGED_DAEMON, "leave")],
    ids=["plain", "stopped", "family", "daemon without the tag", "inside a user's program"],
)
def test_everything_ends_by_sigterm(source: str, adopt: str) -> None:
    found = stop(source, adopt=adopt)
    assert found["left"] == [] and found["kept"]
    assert (found["rank"], found["killed"], found["not_ended"]) == (-15, 0, 0)


def test_one_that_ignores_sigterm_is_killed_at_the_limit() -> None:
    found = stop(IGNORES, limit_s=0.5)
    assert (found["rank"], found["killed"], found["left"]) == (-9, 1, [])
    assert found["over"] >= 0
