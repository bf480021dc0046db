"""Which of the tests that start whole jobs are run: all of them, or a share chosen by a seed.

A job takes seconds, and there are hundreds of these tests: `make test` runs three of ten of them and all others, so
that it ends within ten minutes on two cores; CI runs all of them, and one of five of the long tests. FT_TEST_SHARE is
the share, 1 if not set. FT_TEST_SEED chooses; the first lines of a run name it, and setting it repeats the choice.
Pure.
"""

from __future__ import annotations

import zlib

JOBS = (
    "tests/client/integrations/",
    "tests/demo/",
    "tests/e2e/",
    "tests/faults/",
    "tests/ft_launcher/zygote/",
    "tests/nodes/",
    "tests/slurm/",
)
"""Beginnings of tests of which most start a job: three quarters of the time of all tests."""


def is_chosen(nodeid: str, seed: str, share: float, is_slow: bool = False) -> bool:
    """Returns whether a test is run. Tests that start no job always are, unless they take long."""
    # Not Python's own `hash`, which differs from one process to the next: all workers must choose alike.
    chance = zlib.crc32(f"{seed} {nodeid}".encode()) / 2**32
    return chance < share or not (is_slow or nodeid.startswith(JOBS))
