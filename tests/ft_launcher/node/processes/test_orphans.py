"""Which children of the launcher are orphans of its ranks: a table of samples; and that nobody else's are taken."""

from __future__ import annotations

import pytest

from ft_launcher.node.processes.orphans import SAMPLE_S, Orphans
from ft_launcher.node.processes.process_tree import Stat
from tests.program import python

RANK, LAUNCHER = 50, 10


def zombie(session: int, start: float = 1.0) -> Stat:
    return Stat(parent=LAUNCHER, state="Z", session=session, start=start)


@pytest.mark.parametrize(
    ("adopts", "samples", "found"),
    [
        (True, [{7: zombie(RANK)}], {7}),
        (False, [{7: zombie(RANK)}], {7}),
        (True, [{7: zombie(LAUNCHER)}], set()),
        (True, [{7: zombie(LAUNCHER)}, {7: zombie(LAUNCHER)}], {7}),
        (True, [{7: zombie(7)}, {7: zombie(7)}], {7}),
        (True, [{7: zombie(7)}, {}, {7: zombie(7)}], set()),
        (True, [{7: zombie(7)}, {7: zombie(7, start=2.0)}], set()),
        (False, [{7: zombie(7)}, {7: zombie(7)}], set()),
        (False, [{RANK: zombie(RANK)}], set()),
    ],
    ids=[
        "in a rank's session",
        "the same inside a program",
        "perhaps a library's",
        "still there",
        "a daemon",
        "seen once and gone",
        "its pid is another's now",
        "a child of the program",
        "a child of the program with a rank's former pid",
    ],
)
def test_what_is_an_orphan(adopts: bool, samples: list[dict[int, Stat]], found: set[int]) -> None:
    orphans, last = Orphans(adopts), set[int]()
    for number, zombies in enumerate(samples):
        last = orphans.orphans_among(zombies, {RANK}, number * SAMPLE_S)
    assert last == found


NOBODY_ELSES = """
import os, subprocess, sys, time
from ft_launcher.node.processes.orphans import Orphans
from ft_launcher.node.processes.process_tree import all_stats, become_subreaper

become_subreaper()
own = subprocess.Popen(["sh", "-c", "exit 3"])
rank = subprocess.Popen(["sh", "-c", "sh -c 'exit 4' & sleep 0.1"], start_new_session=True)
def zombies():
    return {pid for pid, stat in all_stats().items() if stat.parent == os.getpid() and stat.state == "Z"}
while not (len(zombies()) == 3 or rank.pid in zombies() and len(zombies()) == 2):
    time.sleep(0.01)
(orphan,) = zombies() - {own.pid, rank.pid} or {0}
Orphans(adopts=True).reap({rank.pid}, {rank.pid}, 0.0)
print(orphan in zombies(), own.wait(), rank.wait())
"""


def test_only_orphans_are_taken() -> None:
    """The codes of the launcher's own children stay for the code that waits for them."""
    assert python(NOBODY_ELSES).stdout.split() == ["False", "3", "0"]
