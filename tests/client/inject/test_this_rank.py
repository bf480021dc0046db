"""For whom a fault is meant, drawn by each rank for itself and the same by all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_client.inject.this_rank import ThisRank, this_rank
from rank_monitor.contract import env
from rank_monitor.contract.settings.injection import parse

RANKS = [ThisRank(rank, 8, rank % 4, rank // 4, run="one") for rank in range(8)]


def meant(text: str, ranks: list[ThisRank] = RANKS) -> list[int]:
    return [rank.rank for rank in ranks if rank.is_meant(parse(f"kind:sigkill,{text}"))]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("rank:3", [3]), ("rank:9", []), ("rank:all", list(range(8))), ("node:1", [4]), ("node:2", [])],
)
def test_named(text: str, ranks: list[int]) -> None:
    assert meant(text) == ranks


def test_one_rank_is_drawn_another_in_another_cycle_or_run() -> None:
    cycles = [meant("cycle:any", [replace(rank, cycle=cycle) for rank in RANKS]) for cycle in range(50)]
    assert all(len(ranks) == 1 for ranks in cycles) and {rank for (rank,) in cycles} == set(range(8))
    runs = [meant("rank:random", [replace(rank, run=str(run)) for rank in RANKS]) for run in range(50)]
    assert {rank for (rank,) in runs} == set(range(8))


def test_a_seed_draws_the_same_in_every_run() -> None:
    runs = [meant("seed:5", [replace(rank, run=str(run)) for rank in RANKS]) for run in range(20)]
    assert len(set(map(tuple, runs))) == 1


@pytest.mark.parametrize(
    ("text", "cycle", "again", "is_meant"),
    [
        ("rank:0", 0, False, True),
        ("rank:0", 1, False, False),
        ("rank:0", 0, True, False),
        ("rank:0,cycle:1", 0, False, False),
        ("rank:0,cycle:1", 1, False, True),
        ("rank:0,cycle:any", 5, False, True),
        ("rank:0,cycle:any", 5, True, True),
    ],
)
def test_cycles(text: str, cycle: int, again: bool, is_meant: bool) -> None:
    assert bool(meant(text, [ThisRank(cycle=cycle, again=again)])) == is_meant


def test_random_is_one_of_two_the_same_for_all() -> None:
    fault = parse("kind:random,seed:1,cycle:any")
    drawn = [{replace(rank, cycle=cycle).kind_of(fault) for rank in RANKS} for cycle in range(30)]
    assert {kind for (kind,) in drawn} == {"sigkill", "sigstop"}


def test_the_rank_that_the_variables_of_a_launcher_describe() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert this_rank(torchrun) == ThisRank(5, 8, 1, 1, 2, "||")
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    assert this_rank(slurm) == ThisRank(3, 4, 1, 1, 0, "||")
    ours = {**torchrun, env.CYCLE: "7", env.REJOIN: "1", "MASTER_PORT": "29500"}
    assert this_rank(ours) == ThisRank(5, 8, 1, 1, 7, "||29500", again=True)
    assert this_rank({}) == ThisRank(run="||")
