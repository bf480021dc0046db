"""A copy behind the training, and the changes that void it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ft_client.memory.overlapped_copy import OverlappedCopy, StateChanged


def copy_of(*sources: Any) -> tuple[OverlappedCopy, list[Any]]:
    """A copy that has not begun, and its targets."""
    copy = OverlappedCopy()
    targets = [torch.zeros_like(source) for source in sources]
    for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
        copy.add(f"tensor {number}", target, source)
    return copy, targets


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor([1.0, torch.nan, -0.0]),
        torch.tensor(3.0),
        torch.randn(4, 6).T,
        torch.randn(8, 8)[:, ::2],
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(300).to(torch.bfloat16),
        torch.randn(7).to(torch.float8_e4m3fn),
        torch.tensor([1, 2**63], dtype=torch.uint64),
    ],
    ids=["NaN", "scalar", "transposed", "gaps", "bool", "complex", "bfloat16", "float8", "uint64"],
)
def test_what_does_not_change_is_copied(source: Any) -> None:
    copy, (target,) = copy_of(source)
    copy.run()
    assert torch.equal(target.contiguous().view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8))
    copy.wait()


def adds(tensor: Any) -> None:
    with torch.no_grad():
        tensor.add_(1)


def adds_unseen(tensor: Any) -> None:
    tensor.data.mul_(2)


def writes_by_numpy(tensor: Any) -> None:
    tensor.detach().numpy()[:] = 7


def loses_its_memory(tensor: Any) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [adds, adds_unseen, writes_by_numpy, loses_its_memory])
def test_a_change_before_the_copy_voids_it(change: Callable[[Any], None]) -> None:
    other, source = torch.ones(10), torch.nn.Parameter(torch.ones(1000))
    copy, _ = copy_of(other, source)
    change(source)
    with pytest.raises(StateChanged, match="tensor 1"):
        copy.run()
    copy.wait()


@pytest.mark.parametrize("change", [adds, adds_unseen, writes_by_numpy])
@pytest.mark.parametrize("when", [0, 1], ids=["when another one is copied", "when all but one are copied"])
def test_a_change_during_the_copy_voids_it(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], when: int
) -> None:
    """Of elements that are not at the beginning of the tensor: of the first tensor, which is copied already."""
    sources = [torch.ones(1000) for _ in range(3)]
    copy, targets = copy_of(*sources)
    of_torch = torch.Tensor.copy_

    def copies(target: Any, source: Any) -> Any:
        done = of_torch(target, source)
        if target is targets[when]:
            change(sources[0][500:])
        return done

    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    with pytest.raises(StateChanged, match="tensor 0"):
        copy.run()


def test_another_tensor_in_place_of_the_parameter_changes_nothing() -> None:
    """The copy has the values of the step that is saved."""
    source = torch.nn.Parameter(torch.ones(10))
    copy, (target,) = copy_of(source)
    source.data = torch.zeros(10)
    copy.run()
    assert torch.equal(target, torch.ones(10))


def test_the_training_waits_for_the_copy_and_for_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, _ = copy_of(torch.ones(10))
    may_copy, waits = threading.Event(), threading.Event()
    of_torch = torch.Tensor.copy_

    def copies(target: Any, source: Any) -> Any:
        may_copy.wait()
        return of_torch(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    order = []

    def work() -> None:
        copy.run()
        order.append("copied")

    def train() -> None:
        waits.set()
        copy.wait()
        order.append("stepped")

    training = threading.Thread(target=train)
    training.start()
    waits.wait()
    assert order == []
    thread = threading.Thread(target=work)
    thread.start()
    may_copy.set()
    training.join()
    thread.join()
    assert sorted(order) == ["copied", "stepped"]


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, _ = copy_of(torch.ones(10))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    copy.wait()
