"""Torch's worker server in a rank: it answers while the GIL is held, is not seen, and hinders nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  (its C part is looked at below)

from rank_monitor.contract import env
from rank_monitor.flight_recorder import FlightRecorder
from rank_monitor.loop import Loop
from tests.patience import patient
from tests.program import clean_environment, python, started

SERVES = """
import sys
from ft_client.start import worker_server
worker_server.answer_after_import()
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


def environment(path: Path) -> dict[str, str]:
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
    with started([sys.executable, "-c", code], env=environment(path)) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        recorder = FlightRecorder(Loop())
        recorder.ask(str(path), time.monotonic())
        groups = recorder.groups(patient(30.0))
        rank.kill()
    assert groups["0"]["entered"] == 1
    assert groups["0"]["operation"] == "all_reduce"


def test_nothing_is_printed_at_start_and_end(tmp_path: Path) -> None:
    ended = python(SERVES.format(more="import torch.distributed"), environ=environment(tmp_path / "f0"))
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_socket_that_cannot_be_made_hinders_nothing() -> None:
    ended = python(SERVES.format(more="import torch.distributed; print(1)"), environ=environment(Path("/nowhere/f0")))
    assert (ended.stdout, ended.stderr) == ("1\n", "")
