"""A fork of ours in a process with threads: no warning, no filter that stays; forks of others warn as Python does."""

from __future__ import annotations

import ast
import json
import sys

import pytest

from tests.program import ROOT, run

FORKS = """
import json, os, sys, threading, warnings
from rank_monitor.contract.processes.fork import fork

end = threading.Event()
threading.Thread(target=end.wait, daemon=True).start()
given = warnings.filters
before = warnings.filters[:]
shown = []
warnings.showwarning = lambda message, *_: shown.append(str(message))
for number in range(2):
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        os.write(writer, b"same" if warnings.filters == before else b"others")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"same"
assert warnings.filters is given and warnings.filters == before
ours = shown[:]
try:
    child = os.fork()
except DeprecationWarning as warning:  # releases differ in whether the filter `error` raises here
    shown.append(str(warning))
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
json.dump([ours, shown], sys.stdout)
"""


@pytest.mark.parametrize("action", ["always", "default", "error"])
def test_a_fork_of_ours_does_not_warn_and_one_of_the_user_does(action: str) -> None:
    done = run([sys.executable, "-W", action, "-c", FORKS], check=True)
    ours, shown = json.loads(done.stdout)
    assert ours == []
    if action != "error" and sys.version_info >= (3, 12):
        assert len(shown) == 1
        assert "multi-threaded" in shown[0]


def test_one_place_forks() -> None:
    """Elsewhere `os.fork` would warn its user."""
    packages = (ROOT / "ft_launcher", ROOT / "rank_monitor", ROOT / "client" / "ft_client")
    files = {
        str(file.relative_to(ROOT))
        for package in packages
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.fork", "os.forkpty")
    }
    assert files == {"rank_monitor/contract/processes/fork.py"}
