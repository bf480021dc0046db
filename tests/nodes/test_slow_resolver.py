"""A resolver that answers after 3 s works for ranks, for a program that calls `launch()`, and for names of nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.nodes import slow_resolver
from tests.nodes.conftest import require
from tests.nodes.netns import unavailable
from tests.program import output_of

LIMIT_S = 240

RANK = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
found = [os.environ.get("RES_OPTIONS"), libc.getenv(b"RES_OPTIONS"), socket.gethostbyname("slow.test")]
open("rank" + os.environ["RANK"], "w").write(str(found))
"""
# While the job runs, a thread of the program looks a name up; it has looked up none before.
PROGRAM = """
import os, socket, threading, time
from pathlib import Path
from ft_launcher import LaunchConfig, launch

def train():
    Path("started").touch()
    while not Path("looked").exists():
        time.sleep(0.01)

def look():
    while not Path("started").exists():
        time.sleep(0.01)
    try:
        Path("found").write_text(str([os.environ.get("RES_OPTIONS"), socket.gethostbyname("slow.test")]))
    finally:
        Path("looked").touch()

if __name__ == "__main__":
    threading.Thread(target=look).start()
    launch(train, LaunchConfig(nproc_per_node=1, warm_start="off"))()
"""
BOTH = '"$@" & "$@"; code=$?; wait; exit $code'
FOUND = [None, "127.0.0.1"]


def run(folder: Path, *words: str) -> None:
    """Runs a program where names are looked up slowly."""
    require(unavailable())
    within = ["unshare", "--net", "--mount", sys.executable, str(slow_resolver.__file__)]
    output_of([*within, *words], folder, LIMIT_S)


@pytest.mark.parametrize("start", ["on", "off"])
def test_ranks_wait_for_a_slow_resolver(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").write_text(RANK)
    run(tmp_path, sys.executable, "-m", "ft_launcher", f"--ft-warm-start={start}", "train.py")
    assert (tmp_path / "rank0").read_text() == str([None, *FOUND])


def test_a_program_that_launches_waits_for_a_slow_resolver(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run(tmp_path, sys.executable, "program.py")
    assert (tmp_path / "found").read_text() == str(FOUND)


@pytest.mark.slow
def test_nodes_meet_at_a_name_that_is_slow_to_resolve(tmp_path: Path) -> None:
    """40 s: each connection asks for the name."""
    (tmp_path / "train.py").write_text(RANK)
    words = (sys.executable, "-m", "ft_launcher", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=slow.test")
    run(tmp_path, "sh", "-c", BOTH, "sh", *words, "train.py")
    assert [(tmp_path / name).read_text() for name in ("rank0", "rank1")] == [str([None, *FOUND])] * 2
