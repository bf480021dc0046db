"""What is done once torch is imported: default timeouts of groups are set, and torch's worker server answers.

Timeouts: in a rank that the bootstrap started in an interpreter of its own. The server answers while the GIL is held,
is not seen, and hinders nothing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  (its C part is looked at below)

from rank_monitor.contract import env
from rank_monitor.flight_recorder import FlightRecorder
from rank_monitor.loop import Loop
from tests import program
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.patience import patient
from tests.program import clean_environment, ended, python

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
ours = [finder for finder in sys.meta_path if type(finder).__module__ == "ft_client.rank.start.after_import"]
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


SERVES = """
import sys
from ft_client.rank.start import after_import
after_import.answer_monitor()
assert "torch" not in sys.modules
{more}
"""
GROUP = """
import ctypes, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print("ready", flush=True)
while True:
    ctypes.PyDLL(None).usleep(600_000_000)  # holds the GIL
"""


def with_server(path: Path) -> dict[str, str]:
    """Of a rank whose server is to listen at `path`."""
    return clean_environment(**{env.FLIGHT_RECORDER_SOCKET: str(path)})


has_server = pytest.mark.skipif(
    not hasattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json"),
    reason="this torch has no flight recorder that answers in JSON",
)


@has_server
def test_it_answers_while_the_gil_is_held(tmp_path: Path) -> None:
    path = tmp_path / "f0"
    path.touch()  # a rank of an earlier cycle left it
    code = SERVES.format(more=GROUP.format(file=tmp_path / "store"))
    with program.started([sys.executable, "-c", code], env=with_server(path)) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        recorder = FlightRecorder(Loop())
        recorder.ask(str(path), time.monotonic())
        groups = recorder.groups(patient(30.0))
        rank.kill()
    assert groups["0"]["entered"] == 1
    assert groups["0"]["operation"] == "all_reduce"


def test_nothing_is_printed_at_start_and_end(tmp_path: Path) -> None:
    done = python(SERVES.format(more="import torch.distributed"), environ=with_server(tmp_path / "f0"))
    assert (done.stdout, done.stderr) == ("", "")


def test_a_socket_that_cannot_be_made_hinders_nothing() -> None:
    done = python(SERVES.format(more="import torch.distributed; print(1)"), environ=with_server(Path("/nowhere/f0")))
    assert (done.stdout, done.stderr) == ("1\n", "")
