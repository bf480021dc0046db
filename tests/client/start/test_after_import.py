"""The default timeout of process groups in a rank that the bootstrap started in an interpreter of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rank_monitor.contract import env
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank import started
from tests.program import ended

IMPORTS_TORCH_S = 240.0

GROUPS = """
import json, sys
from datetime import timedelta
finders = len(sys.meta_path)
assert "torch" not in sys.modules
import torch
import torch.distributed as dist
from torch.distributed import constants, distributed_c10d

def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(json.dumps({
    "names": [vars(module)[name].total_seconds() for module in (constants, distributed_c10d)
              for name in ("default_pg_timeout", "default_pg_nccl_timeout")],
    "group": timeout_of(dist.group.WORLD),
    "another": timeout_of(dist.new_group([0])),
    "explicit": timeout_of(dist.new_group([0], timeout=timedelta(seconds=5))),
    "finders": finders - len(sys.meta_path),
    "loader": sorted(vars(constants.__spec__.loader)),
}))
dist.destroy_process_group()
"""


def test_torchs_defaults_are_replaced_when_torch_is_imported(monitor: FakeMonitor, tmp_path: Path) -> None:
    with started(GROUPS, tmp_path, monitor.path, **{env.NCCL_COLLECTIVE_TIMEOUT: "77.5"}) as rank:
        code, out, err = ended(rank, limit_s=IMPORTS_TORCH_S)
    assert code == 0, err
    told = json.loads(out)
    assert told["names"] == [77.5] * 4
    assert (told["group"], told["another"], told["explicit"]) == (77.5, 77.5, 5.0)
    assert (told["finders"], told["loader"]) == (1, ["name", "path"]), "what waited for torch is gone"


LEAVES_TORCH = """
import sys
import json, wave
ours = [finder for finder in sys.meta_path if type(finder).__module__ == "ft_client.start.after_import"]
print("torch" in sys.modules, len(ours))
"""


@pytest.mark.parametrize(("text", "waiting"), [("60", 1), ("none", 0), (None, 0)])
def test_torch_is_not_imported_for_it(monitor: FakeMonitor, tmp_path: Path, text: str | None, waiting: int) -> None:
    variables = {} if text is None else {env.NCCL_COLLECTIVE_TIMEOUT: text}
    with started(LEAVES_TORCH, tmp_path, monitor.path, **variables) as rank:
        assert ended(rank) == (0, f"False {waiting}\n", "")


@pytest.mark.parametrize("text", ["soon", "-1", "1e300"])
def test_no_limit_is_said_and_the_script_runs(monitor: FakeMonitor, tmp_path: Path, text: str) -> None:
    with started("print('ran')", tmp_path, monitor.path, **{env.NCCL_COLLECTIVE_TIMEOUT: text}) as rank:
        code, out, err = ended(rank)
    assert (code, out) == (0, "ran\n")
    assert err.startswith(f"ft_client: {env.NCCL_COLLECTIVE_TIMEOUT}='{text}' does nothing: ")
