"""A training written against Megatron-LM's calls: a change of its imports is all that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.rerun.megatron_style import SIGNAL_AT, STEPS, pretrain
from tests.client.rerun.ranks import Ranks

pytestmark = [pytest.mark.xdist_group("rerun"), pytest.mark.parametrize("world_size", [2])]


def test_reruns_evaluations_and_an_agreed_stop(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for mode, rate, runs in (("validate_results", 1, 2), ("report_stats", 0, 2), ("disabled", 1, 1)):
        told = ranks.run(pretrain, rerun_mode=mode, rate=rate, kind="transient_error", folder=str(tmp_path), signaled=1)
        for one in told:
            assert [at for at, _ in one["seen"]] == [step for step in range(SIGNAL_AT) for _ in range(runs)]
            assert one["seen"][-1][1] == [4.0, 5.0]
            assert (one["kept"], one["states"]) == (0, {"saved"})
            assert (one["code"], one["stopped"], one["iteration"]) == (0, True, SIGNAL_AT)


def test_a_checkpoint_of_a_step_in_doubt(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    jobs = [
        ranks.run(pretrain, rerun_mode="validate_results", rate=rate, kind="persistent_error", folder=str(tmp_path))
        for rate in (1, 0)
    ]
    for rank, (first, second) in enumerate(zip(*jobs, strict=True)):
        assert (first["code"], first["seen"]) == (16, [(0, [0.0, 1.0])] * 2)
        assert (second["code"], second["seen"]) == (16, [(0, [0.0, 1.0])]), "the same device again says nothing"
        assert any("Need to rerun on a different GPU" in line for line in jobs[1][rank]["lines"])
    calm = ranks.run(pretrain, rerun_mode="disabled", rate=0, kind="transient_error", folder=str(tmp_path))
    assert {(one["code"], one["iteration"], one["stopped"]) for one in calm} == {(0, STEPS, False)}
