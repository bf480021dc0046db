"""A node's clock is stepped while a process runs: its wall clock moves, its other clocks and its waits do not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.nodes import clock
from tests.nodes.conftest import require
from tests.program import started

TELL = """
import ctypes, datetime, json, sys, threading, time
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
libc.pthread_mutex_lock(lock)
for line in sys.stdin:
    time.sleep(0.01)
    threading.Event().wait(0.01)
    began, soon = time.monotonic(), time.time() + 0.01
    libc.pthread_mutex_timedlock(lock, ctypes.byref(Timespec(int(soon), int(soon % 1 * 1e9))))
    waited = time.monotonic() - began
    print(json.dumps([time.time(), datetime.datetime.now().timestamp(), time.monotonic(), waited]), flush=True)
"""
STEP_S = 30.0


def test_the_wall_clock_is_stepped_and_no_other(tmp_path: Path) -> None:
    require(clock.unavailable())
    stepped, environ = clock.Clock(tmp_path, "n0"), dict(os.environ)
    with started([sys.executable, "-S", "-c", TELL], env=environ | dict(stepped.environ)) as process:
        assert process.stdin is not None and process.stdout is not None
        told = []
        for step_s in (0.0, STEP_S, -STEP_S):
            stepped.step(step_s)
            print("now", file=process.stdin, flush=True)
            told.append(json.loads(process.stdout.readline()))
    (wall, _, monotonic, _), *_ = told
    for step_s, (now, date, passed, waited) in zip((0.0, STEP_S, -STEP_S), told, strict=True):
        assert abs(now - wall - (passed - monotonic) - step_s) < 1
        assert abs(date - now) < 1
        assert 0.005 < waited < STEP_S / 2
