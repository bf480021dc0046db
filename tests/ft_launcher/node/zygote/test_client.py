"""A zygote as a user's program has it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.program import clean_environment, run

LIMIT_S = 120.0

PROGRAM = """
import os, time

def parent():
    return os.getppid()

if __name__ == "__main__":
    from ft_launcher import LaunchConfig, launch; from ft_launcher.node.zygote import fork_server

    send = fork_server.send

    def slowly(*args):
        send(*args)
        time.sleep(0.5)  # on a machine with much to do

    fork_server.send = slowly
    found = launch(parent, LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2))()
    assert found == {0: os.getpid(), 1: os.getpid()}, found
"""


def test_ranks_are_children_of_a_program_that_is_slow_to_hear_of_them(tmp_path: Path) -> None:
    """They are orphans before it does: whose, is decided then, and ranks of another parent end themselves."""
    (tmp_path / "program.py").write_text(PROGRAM)
    run([sys.executable, "program.py"], folder=tmp_path, environ=clean_environment(), limit_s=LIMIT_S, check=True)
