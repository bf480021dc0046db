"""Four real ranks with a gloo group: who is slow is found, who is not is left alone, all ranks do the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.client.straggler import rank_parts
from tests.client.straggler.ranks import results, run_ranks

pytestmark = pytest.mark.xdist_group("straggler")  # one process is forked for all of them

NOBODY: dict[str, Any] = {"straggler_sections_relative": {}, "straggler_sections_individual": {}}


def check_numbers(told: dict[str, Any]) -> None:
    """All section scores are in (0, 1], none is NaN; without kernels a GPU score is."""
    scores = [one for kind in ("relative", "individual") for by_rank in told[kind].values() for one in by_rank.values()]
    assert all(0 < score <= 1 for score in scores)
    assert all(math.isnan(score) for gpus in told["gpus"] for score in gpus.values())
    assert told["slow_gpus"] == []


def test_a_rank_that_sleeps_longer_is_found(tmp_path: Path) -> None:
    told, *others = results(rank_parts.one_is_slow, tmp_path, True)
    assert others == [None] * 3
    check_numbers(told)
    assert told["nodes"] == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}
    assert told["slow"] == {**NOBODY, "straggler_sections_relative": {"work": [(2, "node1")]}}
    assert told["relative"]["work"][2] < 0.5
    assert told["individual"] == {"work": dict.fromkeys(range(4), 1.0)}


def test_a_rank_that_computes_longer_is_found(tmp_path: Path) -> None:
    """What else runs on this machine slows healthy ranks as well, but none of them as much."""
    told, *_ = results(rank_parts.one_is_slow, tmp_path, False, 9)
    check_numbers(told)
    scores = told["relative"]["work"]
    assert min(scores, key=scores.__getitem__) == 2
    assert (2, "node1") in told["slow"]["straggler_sections_relative"]["work"]


def test_a_rank_that_slows_down_is_found_by_its_own_past(tmp_path: Path) -> None:
    first, *later = results(rank_parts.one_slows_down, tmp_path)[0]
    assert first["slow"] == NOBODY
    for told in later:
        assert told["relative"] == {}
        assert told["slow"] == {**NOBODY, "straggler_sections_individual": {"work": [(1, "n")]}}


def test_calm_ranks_are_left_alone(tmp_path: Path) -> None:
    for told in results(rank_parts.calm, tmp_path, 3, True)[0]:
        check_numbers(told)
        assert told["slow"] == NOBODY


@pytest.mark.slow
@pytest.mark.parametrize("run", range(20))
def test_calm_runs(tmp_path: Path, run: int) -> None:
    for told in results(rank_parts.calm, tmp_path, 2, False)[0]:
        check_numbers(told)
        assert told["slow"] == NOBODY


def test_a_report_costs_two_agreements_and_names_travel_when_new(tmp_path: Path) -> None:
    """Torch's collectives need to know how long the names are."""
    steady, with_names = {"all_reduce": 1, "gather": 1}, {"all_reduce": 3, "all_gather": 1, "gather": 1}
    assert results(rank_parts.agreements, tmp_path) == [[with_names, steady, with_names, steady]] * 4


def test_what_is_not_gathered(tmp_path: Path) -> None:
    for rank, told in enumerate(results(rank_parts.silent_modes, tmp_path, world=2)):
        kinds, nodes, names = told["individual_perf_scores"]
        assert (kinds, nodes, names) == (set(), {rank: f"n{rank}"}, [[], ["work"]])
        kinds, nodes, names = told["relative_perf_scores"]
        assert kinds == {"all_reduce", "all_gather"}
        assert (nodes, names) == ({rank: f"n{rank}"}, [["work"], []])


def test_kernels_count_where_every_rank_with_kernels_has_them(tmp_path: Path) -> None:
    first, second = results(rank_parts.kernels_of_some, tmp_path)[0]
    assert first == {0: 1.0, 1: 0.5, 2: 1.0, 3: 1.0}
    assert math.isnan(second.pop(3))
    weights = {0: (10, 10), 1: (20, 20), 2: (10, 30)}
    ratios = {0: (1.0, 1.0), 1: (0.5, 0.5), 2: (1.0, 1 / 3)}
    expected = {r: sum(map(float.__mul__, ratios[r], map(float, weights[r]))) / sum(weights[r]) for r in weights}
    assert second == pytest.approx(expected)


def test_all_ranks_report_at_the_same_steps(tmp_path: Path) -> None:
    told = results(rank_parts.uneven_steps, tmp_path)
    assert len(told[0]) >= 1
    assert told == [told[0]] * 4


def test_all_ranks_stop_together_save_and_leave_with_the_code(tmp_path: Path) -> None:
    ended = run_ranks(rank_parts.stops, tmp_path, tmp_path, 9)
    assert [one.code for one in ended] == [9] * 4
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == [f"saved.{rank}" for rank in range(4)]
    warning = "STRAGGLER DETECTION WARNING: Some ranks have worse relative performance. Affected ranks: [2"
    said = (tmp_path / "log.0").read_text().splitlines()
    assert any(line.startswith(warning) for line in said)  # the worst first
    assert said[:2] == ["Section relative performance:", " Worst performing 1/4 ranks:"]
    record = next(json.loads(line) for line in said if line.startswith("{"))
    assert record["scores"][0]["flagged"][0]["rank"] == 2
    assert not any("performance" in (tmp_path / f"log.{rank}").read_text() for rank in (1, 2, 3))


def test_all_ranks_are_told_to_stop_at_the_same_step(tmp_path: Path) -> None:
    told = results(rank_parts.stops, tmp_path, tmp_path, None)
    assert told[0] >= 0 and told == [told[0]] * 4


def test_without_stop_if_detected_it_goes_on_and_begins_again(tmp_path: Path) -> None:
    told = results(rank_parts.goes_on, tmp_path)
    assert told[0] >= 2 and told == [told[0]] * 4


def test_it_begins_again_after_a_restart_in_process(tmp_path: Path) -> None:
    told = results(rank_parts.begins_again, tmp_path, tmp_path)[0]
    for turn, one in enumerate(told):
        check_numbers(one)
        assert set(one["relative"]) == {f"work{turn}"}
        assert one["nodes"] == {rank: f"turn{turn} of {rank}" for rank in range(4)}
