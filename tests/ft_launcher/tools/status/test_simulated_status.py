"""The launcher that the benchmark P14 asks: what it says is what a launcher says now."""

from __future__ import annotations

import json
import sys

from tests.ft_launcher.tools.status.test_listening import get
from tests.program import ROOT, clean_environment, ended, started


def test_it_answers() -> None:
    words = [sys.executable, "-m", "scripts.bench.simulated_status", "8"]
    with started(words, cwd=ROOT, env=clean_environment()) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        found = json.loads(get(port, "/status.json")[1])
        assert (len(found["ranks"]), found["fault_count"], len(found["cycles"])) == (8, 20, 21)
        assert get(port, "/metrics")[0] == 200
        assert len(json.loads(get(port, "/fault.json?number=20")[1])["collectives"]) == 10
        assert ended(process) == (0, "", "")
