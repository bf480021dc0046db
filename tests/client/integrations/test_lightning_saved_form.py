"""In which form a strategy's checkpoint lies in memory, and the step of one on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ft_client.integrations.lightning.saved_form import SavedForm, saved_form, step_on_disk


def test_what_all_ranks_have_is_written_on_each_node() -> None:
    assert saved_form("Strategy.save_checkpoint", has_shards=False, is_one_node=False) is SavedForm.REPLICATED


@pytest.mark.parametrize(
    ("name", "has_shards"),
    [
        ("Strategy.save_checkpoint", True),
        ("FSDPStrategy.save_checkpoint", False),
        ("ModelParallelStrategy.save_checkpoint", False),
    ],
)
def test_shards_are_kept_on_one_node_only(name: str, has_shards: bool) -> None:
    assert saved_form(name, has_shards, is_one_node=True) is SavedForm.SHARDED
    assert "on several nodes" in str(saved_form(name, has_shards, is_one_node=False))


def test_a_strategy_that_is_not_known_is_named() -> None:
    assert str(saved_form("MyStrategy.save_checkpoint", False, True)).startswith("MyStrategy is none of")


def test_the_latest_of_the_last_checkpoints_counts(tmp_path: Path) -> None:
    for age, step in ((2, 7), (1, 9)):
        file = tmp_path / f"last-v{step}.ckpt"
        torch.save({"global_step": step, "weights": torch.ones(3)}, file)
        os.utime(file, (1000 - age, 1000 - age))
    torch.save({"global_step": 20}, tmp_path / "best.ckpt")
    assert step_on_disk(tmp_path) == 9
    assert step_on_disk(tmp_path / "last-v7.ckpt") == 7


def test_the_step_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "last.ckpt"
    checkpoint.mkdir()
    torch.save({"global_step": 5}, checkpoint / "meta.pt")
    assert step_on_disk(checkpoint) == step_on_disk(tmp_path) == 5


def test_no_checkpoint_and_a_torn_one_have_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_on_disk(tmp_path) == step_on_disk(tmp_path / "none.ckpt") == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "last.ckpt").write_bytes(b"half")
    assert step_on_disk(tmp_path) == 0
    assert "the step of" in capsys.readouterr().err
