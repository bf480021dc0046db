"""Each path through the states with real ranks. A step that a rerun repaired leaves the weights of a calm job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ft_client.rerun import RerunStateMachine
from tests.client.rerun.ranks import Ranks, Told
from tests.client.rerun.training import train

pytestmark = pytest.mark.xdist_group("rerun")
worlds = pytest.mark.parametrize("world_size", [1, 2, 4])
BAD_STEP = 2


_CALM: dict[int, list[Told]] = {}


@pytest.fixture
def calm(ranks: Ranks) -> list[Told]:
    """The job in which nothing is wrong."""
    return _CALM.setdefault(ranks.world_size, ranks.run(train))


class Jobs:
    """Jobs one after the other over one checkpoint; the last rank is the one with the fault, in step 2."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def run(self, *bad_runs: int, rank_0: Sequence[int] = (), **arguments: Any) -> list[Told]:
        """One job; the fault is there in the runs `bad_runs` of the step, and on rank 0 in those of `rank_0`."""
        bad = {0: rank_0} | {self.ranks.world_size - 1: bad_runs}
        return self.ranks.run(train, bad_runs=bad, checkpoints=str(self.folder), **arguments)


@pytest.fixture
def jobs(ranks: Ranks, tmp_path: Path) -> Jobs:
    return Jobs(ranks, tmp_path)


def same_end(first: list[Told], second: list[Told]) -> bool:
    return [(one["weight"], one["draws"]) for one in first] == [(one["weight"], one["draws"]) for one in second]


def said(told: Told, *texts: str) -> None:
    """Each text is in a line of the log, in this order."""
    lines = iter(told["lines"])
    for text in texts:
        assert any(text in line for line in lines), (text, told["lines"])


def codes(told: list[Told]) -> set[int]:
    return {one["code"] for one in told}


@worlds
def test_nothing_wrong(calm: list[Told], world_size: int) -> None:
    for one in calm:
        assert [iteration for iteration, _ in one["seen"]] == [0, 1, 2, 3]
        assert one["lines"] == []
    assert codes(calm) == {0}


@worlds
def test_transient(jobs: Jobs, calm: list[Told], world_size: int) -> None:
    told = jobs.run(0)
    rank = world_size - 1
    for one in told:
        assert [iteration for iteration, _ in one["seen"]] == [0, 1, 2, 2, 3]
        assert one["seen"][2][1] == one["seen"][3][1]
    said(
        told[-1],
        f"Unexpected result tensor(nan) on rank {rank} at iteration #2 invocation #2 (message='loss is NaN')",
        "First rerun: unexpected result is not reproducible within the tolerance",
        "Possible transient error!",
    )
    said(told[0], "a rank has an unexpected result: all ranks compute the step again")
    assert sum(len(one["lines"]) for one in told) == 4
    assert told[-1]["diagnostics"] == [None, None, "transient_error", None]
    assert codes(told) == {0}
    assert same_end(told, calm)


@worlds
@pytest.mark.parametrize("loader", ["after", "before"])
def test_persistent_then_another_device_differs(jobs: Jobs, calm: list[Told], loader: str, world_size: int) -> None:
    first = jobs.run(0, 1, loader=loader)
    said(
        first[-1],
        "First rerun: unexpected result is reproducible within the tolerance",
        "Need to rerun on a different GPU to verify correctness",
    )
    assert codes(first) == {16}
    assert all(one["saved"] and one["state"] == "will_rerun_from_checkpoint" for one in first)
    assert all(one["steps"] == BAD_STEP for one in first)

    second = jobs.run(node="b", loader=loader)
    assert codes(second) == {17}
    for before, after in zip(first, second, strict=True):
        assert after["seen"][0] == before["seen"][-1], "the microbatches that were saved"
        assert after["saved"]
    said(
        second[-1],
        "Second rerun: unexpected result is not reproducible on a different GPU, therefore was likely incorrect",
        "Possible persistent error! (rank",
    )
    assert any("node a, device cpu" in line for line in second[-1]["lines"])
    assert second[-1]["diagnostics"] == ["persistent_error"]

    third = jobs.run(node="b", loader=loader)
    assert codes(third) == {0}, "the step is in doubt no more"
    assert [iteration for iteration, _ in third[0]["seen"]] == [2, 3]
    assert same_end(third, calm)


@worlds
def test_another_device_gives_the_same(jobs: Jobs, calm: list[Told], world_size: int) -> None:
    assert codes(jobs.run(0, 1, harmless=True)) == {16}
    second = jobs.run(0, node="b", harmless=True)
    said(
        second[-1],
        "Second rerun: unexpected result is reproducible on a different GPU, therefore it was likely correct",
        "Correct result (but possible Application error)",
    )
    assert second[-1]["diagnostics"] == ["correct_result", None]
    assert codes(second) == {0}
    assert [iteration for iteration, _ in second[0]["seen"]] == [2, 3]
    assert second[0]["state"] == "not_running_yet"
    assert same_end(second, calm)


@worlds
def test_the_same_device_again_says_nothing(jobs: Jobs, calm: list[Told], world_size: int) -> None:
    assert codes(jobs.run(0, 1)) == {16}
    before = [path.read_bytes() for path in sorted(jobs.folder.glob("checkpoint-*"))]
    again = jobs.run(0, node="a")
    assert codes(again) == {16}
    assert not again[0]["saved"]
    assert again[0]["state"] == "restarting_again"
    said(again[0], "the job has to move")
    assert [path.read_bytes() for path in sorted(jobs.folder.glob("checkpoint-*"))] == before
    assert codes(jobs.run(node="b")) == {17}
    assert same_end(jobs.run(node="b"), calm)


@worlds
def test_not_fatal(jobs: Jobs, calm: list[Told], world_size: int) -> None:
    told = jobs.run(0, 1, fatal=False, harmless=True)
    said(told[-1], "Unexpected result tensor(nan)", "is reproducible within the tolerance", "training goes on")
    assert codes(told) == {0}
    assert same_end(told, calm)


@worlds
def test_a_spiky_loss_is_not_fatal(jobs: Jobs, calm: list[Told], world_size: int) -> None:
    told = jobs.run(0, 1, bad_value=1e9, harmless=True)
    place = f"on rank {world_size - 1} at iteration #2 invocation #2 (message='loss is unexpectedly large')"
    said(told[-1], "Unexpected result tensor(1.0000e+09) " + place, "training goes on")
    assert codes(told) == {0}
    assert same_end(told, calm)


@worlds
def test_statistics_of_reruns(ranks: Ranks, world_size: int) -> None:
    told = ranks.run(train, mode="report_determinism_stats", bad_runs={0: (1,)}, steps=10)
    for one in told:
        assert [iteration for iteration, _ in one["seen"]] == [step for step in range(10) for _ in range(2)]
        assert one["code"] == 0
    lines = [line for line in told[0]["lines"] if "Variability" in line]
    assert len(lines) == 4, "two checks, after the first and the tenth rerun"
    nan = [line for line in lines if "'loss is NaN'" in line]
    assert "after 1 reruns: training.py" in nan[0]
    assert f"samples={2 * world_size} avg=0 p50=0 p90=0 p99=0 p99.9=0 max=0" in nan[0]
    assert f"samples={20 * world_size} avg=inf p50=0" in nan[1] and nan[1].endswith("max=inf")
    assert all(one["lines"] == [] for one in told[1:])


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("data", ["list", "none"])
def test_kinds_of_data(jobs: Jobs, calm: list[Told], data: str, world_size: int) -> None:
    if data == "none":
        told = jobs.run(data=data)
        assert same_end(told, calm)
        return
    assert same_end(jobs.run(0, data=data), calm)
    assert codes(jobs.run(0, 1, data=data)) == {16}
    assert codes(jobs.run(data=data, node="b")) == {17}
    assert same_end(jobs.run(data=data, node="b"), calm)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    ("kind", "ends"),
    [("transient_error", [0]), ("persistent_error", [16, 17]), ("correct_result", [16, 16, 0])],
)
def test_injected(jobs: Jobs, kind: str, ends: list[int], world_size: int) -> None:
    """Every check of a first run gets an error: a correct result leads to the next step, which gets one as well."""
    log = []
    for number, end in enumerate(ends):
        told = jobs.run(rate=1, injected=kind, node=str(number), steps=2)
        assert codes(told) == {end}
        log += [line for one in told for line in one["lines"] if f"rejected on purpose as {kind}" in line]
    for one in told:
        assert one["diagnostics"] == [kind] * (2 if kind == "transient_error" else 1)
    faulty_steps, checks_per_step = (1 if kind == "persistent_error" else 2), 4
    assert len(log) == world_size * faulty_steps * checks_per_step


@pytest.mark.parametrize("world_size", [2])
def test_the_tracker_file(jobs: Jobs, world_size: int) -> None:
    tracker = jobs.folder / "rejected"
    skipped = RerunStateMachine.get_skipped_iterations_from_tracker_file
    where = {"tracker": str(tracker), "harmless": True}
    assert skipped(str(tracker)) == []
    jobs.run(0, **where)
    assert skipped(str(tracker)) == [], "a transient error"
    jobs.run(0, 1, **where)
    assert skipped(str(tracker)) == [], "still in doubt"
    jobs.run(0, node="b", **where)
    assert skipped(str(tracker)) == [BAD_STEP], "it comes again everywhere"
    events = [json.loads(line) for line in tracker.read_text().splitlines()]
    assert [event["status"] for event in events] == [
        "unexpected",
        "first_rerun_not_reproducible",
        "unexpected",
        "first_rerun_reproducible",
        "second_rerun_reproducible",
    ]
    assert {(event["rank"], event["iteration"], event["node"], event["result"]) for event in events} == {
        (1, BAD_STEP, "a", "tensor(nan)")
    }


@pytest.mark.parametrize("world_size", [2])
def test_two_ranks_in_doubt(jobs: Jobs, world_size: int) -> None:
    """The result of one comes again on the other device, that of the other does not: the device decides."""
    assert codes(jobs.run(0, 1, rank_0=(0, 1))) == {16}
    told = jobs.run(rank_0=(0,), node="b")
    assert [one["diagnostics"] for one in told] == [["correct_result"], ["persistent_error"]]
    assert codes(told) == {17}
