"""No innocent rank is named, whatever ranks with GPUs do when one of them stops: random programs."""

from __future__ import annotations

import random

import pytest

from ft_launcher.decide.attribution.collective import find_culprits
from tests.ft_launcher.decide.attribution.simulated_gpus import SLEEP, SYNC, Job, Step, random_programs

RUNS = 400


@pytest.mark.parametrize("marks_batches", [True, False])
@pytest.mark.parametrize("has_buffers", [True, False])
def test_nobody_but_the_rank_that_sleeps(has_buffers: bool, marks_batches: bool) -> None:
    named = 0
    for seed in range(RUNS):
        chance = random.Random(seed)
        programs, groups = random_programs(chance)
        if not Job(programs, groups, has_buffers).has_ended():
            continue
        sleeper = chance.choice(list(programs))
        programs[sleeper].insert(chance.randint(0, len(programs[sleeper])), SLEEP)
        finding = find_culprits(Job(programs, groups, has_buffers).views(marks_batches))
        assert set(finding.culprits) <= {sleeper}, f"seed {seed}: {finding}; {programs}"
        named += bool(finding.culprits)
    assert named > RUNS / 10


def stage(*messages: tuple[str, int]) -> list[Step | str]:
    """Sends and receives, each of which the CPU waits for."""
    return [step for message in messages for step in (Step("pp", messages=(message,)), SYNC)]


def test_a_pipeline_whose_last_stage_sleeps() -> None:
    """The others wait for their gradients, each for that of the next one."""
    programs = {
        4: stage(("send", 5), ("recv", 5)),
        5: stage(("recv", 4), ("send", 6), ("recv", 6), ("send", 4)),
        6: stage(("recv", 5), ("send", 7), ("recv", 7), ("send", 5)),
        7: [*stage(("recv", 6)), SLEEP, *stage(("send", 6))],
    }
    finding = find_culprits(Job(programs, {"pp": [4, 5, 6, 7]}, has_buffers=False).views(marks_batches=True))
    assert (finding.culprits, finding.text, finding.waiting) == (
        (7,),
        "never sent what rank 6 is to receive",
        (4, 5, 6),
    )
