"""State in memory of a training on a GPU: tensors, the optimizer's state and the device's random numbers come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ft_client as ft
from ft_client.memory.background_work import BACKGROUND
from rank_monitor.contract import env
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.wire.json_record import write_record

pytestmark = pytest.mark.gpu


class Training:
    """A model on the GPU, with dropout and data from the device's generator."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.3)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.keep = ft.MemoryCheckpoint(model=self.model, optimizer=self.optimizer)

    def run(self, start: int, end: int) -> None:
        for step in range(start, end):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 256, device="cuda")).square().mean().backward()
            self.optimizer.step()
            self.keep.step(step + 1)
        BACKGROUND.wait()

    def values(self) -> list[Any]:
        return [value.clone() for value in self.model.state_dict().values()]


def test_a_training_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    undisturbed = Training()
    undisturbed.run(0, 9)
    monkeypatch.setenv(env.MEMORY_FILES, write_record(MemoryFiles(str(tmp_path), keep=2, limit=1 << 30, interval=1)))
    first = Training()
    assert first.keep.load() == 0
    first.run(0, 6)
    second = Training()
    assert second.keep.load() == 6
    second.run(6, 9)
    assert first.keep.failures == second.keep.failures == 0
    assert all(torch.equal(*pair) for pair in zip(second.values(), undisturbed.values(), strict=True))
