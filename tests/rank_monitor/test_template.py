"""The template's warm-up leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rank_monitor.log import Log
from rank_monitor.lost_launcher import MonitoredJob
from rank_monitor.template import warm_up


def test_nothing_is_left_of_the_warm_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = Log("template")
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        warm_up(MonitoredJob("tag-of-nobody", str(tmp_path)), log)
    # Fewer is no leak: the collector closes what other tests of this process have left.
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert tmp_path.is_dir()
    assert "[template]" not in capfd.readouterr().err
    assert log.name == "template"
