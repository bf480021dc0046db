"""What all ranks of a cycle find in their environment."""

from __future__ import annotations

import json
import os

from ft_launcher.ranks.devices import Relocation
from ft_launcher.ranks.environment import cycle_environment
from rank_monitor.contract.settings.config import NcclSettings
from rank_monitor.contract.wire.messages import ResultInDoubt

DOUBT = ResultInDoubt("reproducible", 1, 7, "a", "cuda:GPU-1")


def test_nccls_settings_reach_the_ranks_and_not_the_launcher() -> None:
    before, settings = dict(os.environ), NcclSettings(nccl_collective_timeout=60.0, nccl_async_error_handling=2)
    found = cycle_environment(settings, {"TORCH_NCCL_ENABLE_MONITORING": "0"}, {}, Relocation())
    assert found == {
        "FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC": "60",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }
    assert dict(os.environ) == before


def test_ranks_that_moved_are_told_why_and_see_other_devices() -> None:
    found = cycle_environment(NcclSettings(), {}, {"step": 2.0}, Relocation(DOUBT, "GPU-2,GPU-3"))
    assert json.loads(found["FT_LIMIT_MULTIPLIERS"]) == {"step": 2.0}
    assert ResultInDoubt(**json.loads(found["FT_RESULT_IN_DOUBT"])) == DOUBT
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3"
