"""The rerun machine on a GPU: its random numbers come again, its group is NCCL's, its device goes by its UUID."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_client.rank import rng
from ft_client.rerun import RerunStateMachine
from ft_client.rerun.unexpected_result import current_device

pytestmark = pytest.mark.gpu


def draw() -> list[float]:
    values: list[float] = torch.randn(4, device="cuda").tolist()
    return values


@pytest.mark.parametrize("through_json", [False, True])
def test_random_numbers_of_the_device(through_json: bool) -> None:
    draw()
    state = rng.save()
    if through_json:
        state = rng.from_json(json.loads(json.dumps(rng.to_json(state))))
    first = draw()
    rng.restore(state)
    assert draw() == first


def test_the_device_by_its_uuid() -> None:
    draw()
    assert current_device("a").device == f"cuda:{torch.cuda.get_device_properties(0).uuid}"


def test_a_transient_error_with_a_check_in_the_backward_pass(tmp_path: Path) -> None:
    """The hook runs in a thread of torch's."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    machine, values = RerunStateMachine(mode="validate_results"), [float("nan"), 1.0]
    weight = torch.ones(1, device="cuda", requires_grad=True)

    def check(gradient: Any) -> None:
        machine.validate_result(gradient * values.pop(0), torch.isnan, "gradient is NaN")

    weight.register_hook(check)
    while machine.should_run_forward_backward(None):
        (weight * torch.rand(1, device="cuda")).backward()
    assert machine.diagnostic == "transient_error"
    values += [1.0] * 200
    started = time.perf_counter()
    for _ in range(100):
        while machine.should_run_forward_backward(None):
            machine.validate_result(weight, torch.isnan, "weight is NaN")
    print(f"a step with one check, world of one over NCCL: {(time.perf_counter() - started) * 1e4:.1f} us")
    dist.destroy_process_group()
