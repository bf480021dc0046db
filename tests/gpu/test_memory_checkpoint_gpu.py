"""State in memory of a training on a GPU: tensors, the optimizer's state and the device's random numbers come back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

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


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ShardedTraining:
    """FSDP2: each parameter is a DTensor, as are the optimizer's moments."""

    def __init__(self, offload: OffloadPolicy) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
        for layer in self.model:
            fully_shard(layer, offload_policy=offload)
        fully_shard(self.model, offload_policy=offload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.keep = ft.MemoryCheckpoint(model=self.model, optimizer=self.optimizer)

    def run_one_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 2048, device="cuda")).square().mean().backward()
        self.optimizer.step()

    def shards(self) -> list[Any]:
        """All parameters and moments."""
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.to_local().detach().clone() for tensor in [*self.model.parameters(), *moments]]


@pytest.mark.parametrize(("offload", "copies"), [(OffloadPolicy(), 2.5), (CPUOffloadPolicy(), 0.1)], ids=["gpu", "cpu"])
def test_a_load_takes_no_more_memory_than_the_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_group: None, offload: OffloadPolicy, copies: float
) -> None:
    """The state is not copied to the GPU beside the model, only the optimizer's moments, which are not there yet."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(env.MEMORY_FILES, write_record(MemoryFiles(str(tmp_path), keep=1, limit=1 << 30, interval=1)))
    first = ShardedTraining(offload)
    first.keep.load()
    first.run_one_step()
    first.keep.step(1)
    BACKGROUND.wait()
    assert first.keep.failures == 0
    expected = [shard.cpu() for shard in first.shards()]
    del first
    second = ShardedTraining(offload)
    gc.collect()
    size = sum(parameter.numel() * parameter.element_size() for parameter in second.model.parameters())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert second.keep.load() == 1
    assert torch.cuda.max_memory_allocated() - before <= copies * size
    found = second.shards()
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))
    assert {shard.device.type for shard in found} == {next(second.model.parameters()).device.type}
    second.run_one_step()
