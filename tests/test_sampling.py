"""The choice of tests: the same for all workers, of the size asked for, another with each seed."""

from __future__ import annotations

import sys

from tests.program import ROOT, run
from tests.sampling import JOBS, is_chosen

CASES = [f"{JOBS[0]}test_a.py::test_b[{number}]" for number in range(10_000)]


def chosen(seed: str, share: float) -> set[str]:
    return {case for case in CASES if is_chosen(case, seed, share)}


def test_a_share_of_the_tests_that_start_jobs() -> None:
    assert abs(len(chosen("1", 0.3)) - 3000) < 200
    assert chosen("1", 1.0) == set(CASES)
    assert chosen("1", 0.0) == set()


def test_the_seed_chooses() -> None:
    assert chosen("1", 0.3) == chosen("1", 0.3)
    assert chosen("1", 0.3) != chosen("2", 0.3)


def test_all_others_are_run() -> None:
    assert is_chosen("tests/rank_monitor/test_log.py::test_a", "1", 0.0)


def test_a_long_test_is_chosen_wherever_it_is() -> None:
    assert not is_chosen("tests/rank_monitor/test_log.py::test_a", "1", 0.0, is_slow=True)
    assert is_chosen("tests/rank_monitor/test_log.py::test_a", "1", 1.0, is_slow=True)


def test_pytest_collects_without_its_cache() -> None:
    """Read-only checkouts are tested so."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--collect-only",
        "-q",
        __file__,
    ]
    run(words, folder=ROOT, check=True)
