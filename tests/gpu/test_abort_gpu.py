"""A world of one over NCCL whose main thread waits for a device that is stuck: aborted, then used again."""

from __future__ import annotations

import pytest
import torch

from tests.program import python

pytestmark = pytest.mark.gpu

DEADLINE_S = 150.0
RANK = """
import faulthandler, threading
faulthandler.dump_traceback_later(120, exit=True)
import torch
from torch import distributed as dist
from ft_client.inprocess.abort import AbortTorchDistributed
from ft_client.inprocess.health_check import CudaHealthCheck
from ft_client.inprocess.state import State

STATE = State(0, 1).freeze()
STUCK = torch.cuda.Event()


def begin():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ones = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(ones)
    assert ones.sum().item() == 1 << 20
    return ones


def abort(seen):
    AbortTorchDistributed()(STATE)
    seen.append((STUCK.query(), dist.is_initialized()))


for _ in range(3):
    ones = begin()
    torch.cuda._sleep(10_000_000_000)  # several seconds, and the collective waits for it
    STUCK.record()
    dist.all_reduce(ones)
    seen = []
    aborting = threading.Thread(target=abort, args=(seen,))
    aborting.start()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("met", type(error).__name__)
    aborting.join()
    print("aborted while stuck" if not seen[0][0] else "aborted later")
    assert not seen[0][1]
    CudaHealthCheck()(STATE)
begin()
dist.destroy_process_group()
print("done")
"""


def test_a_stuck_device() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip(f"needs NCCL: torch {torch.__version__} has none")
    done = python(RANK, limit_s=DEADLINE_S)
    assert done.stdout.splitlines()[-1] == "done"
    print(done.stdout)
