"""What frees blocked main threads: real ranks over gloo, one program for all operations; the rest in this process."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from ft_client.inprocess import abort
from ft_client.inprocess.abort import AbortPersistentCheckpointProcesses, AbortTorchDistributed, AbortTransformerEngine
from ft_client.inprocess.state import State
from tests.program import python, run

ROOT = Path(__file__).resolve().parents[3]
STATE = State(3, 4, iteration=2).freeze()
DEADLINE_S = 150.0
LOOK_UP_ONCE = "timeout:1 attempts:1"  # torch's store asks for the names of its peers
ONE_TO_ALL = ["broadcast", "objects", "recv", "send", "monitored"]
AT_ONCE = [
    "all_reduce",
    "asynchronous",
    "callback",
    "outlived",
    "barrier",
    "gather",
    "second group",
    "new group",
    "agreement",
    "init",
]
ALL = [*AT_ONCE, *ONE_TO_ALL]
OF_FOUR = ["all_reduce", "recv", "agreement", "init"]


Story = tuple[list[str], list[list[int]]]


def aborted(world: int, rounds: int, operations: list[str]) -> dict[str, dict[int, Story]]:
    """For each operation and rank: what the main thread met in each round, and threads and descriptors after each."""
    program = [sys.executable, "-m", "tests.client.inprocess.aborted_ranks", str(world), str(rounds), *operations]
    quiet = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "fatal", "RES_OPTIONS": LOOK_UP_ONCE}
    done = run(program, folder=ROOT, environ=quiet, limit_s=DEADLINE_S * 4, check=True)
    told: dict[str, dict[int, Story]] = {operation: {} for operation in operations}
    for operation, rank, met, counts in map(json.loads, done.stdout.splitlines()):
        told[operation][rank] = (met, counts)
    return told


def check(ranks: dict[int, Story], rounds: int) -> None:
    """Each rank but the last one was freed in each round, and no round left anything behind."""
    for rank, (met, counts) in ranks.items():
        assert len(met) == (rounds if rank < len(ranks) - 1 else 0)
        assert set(met) <= {"RuntimeError", "DistNetworkError"}
        assert len(counts) == rounds and counts[-1] == counts[0], f"rank {rank} grows: {counts}"


@pytest.fixture(scope="module")
def of_two() -> dict[str, dict[int, Story]]:
    return aborted(2, 2, ALL)


@pytest.fixture(scope="module")
def of_four() -> dict[str, dict[int, Story]]:
    return aborted(4, 2, OF_FOUR)


@pytest.mark.timeout(DEADLINE_S * 5)
@pytest.mark.parametrize("operation", ALL)
def test_one_of_two_is_freed(operation: str, of_two: dict[str, dict[int, Story]]) -> None:
    check(of_two[operation], 2)


@pytest.mark.timeout(DEADLINE_S * 5)
@pytest.mark.parametrize("operation", OF_FOUR)
def test_three_of_four_are_freed(operation: str, of_four: dict[str, dict[int, Story]]) -> None:
    check(of_four[operation], 2)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S * 5)
@pytest.mark.parametrize("operation", ["all_reduce", "ddp", "init"])
@pytest.mark.parametrize("world", [2, 4])
def test_fifty_times_in_a_row(operation: str, world: int) -> None:
    check(aborted(world, 50, [operation])[operation], 50)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks' store to cut this process off from."""
    monkeypatch.delenv("MASTER_PORT", raising=False)


@pytest.fixture
def group(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_no_process_group(alone: None) -> None:
    assert AbortTorchDistributed("/nowhere")(STATE) is STATE


def test_torch_is_not_imported_for_it() -> None:
    code = """
import sys
from ft_client.inprocess.abort import AbortTorchDistributed, reset_groups
from ft_client.inprocess.state import State
AbortTorchDistributed()(State(0, 1).freeze())
reset_groups()
assert "torch" not in sys.modules
"""
    python(code, limit_s=DEADLINE_S)


@pytest.mark.parametrize("port", ["", "none", "-1"])
def test_a_port_that_is_none(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert AbortTorchDistributed()(STATE) is STATE


records = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace"), reason="this torch has no Flight Recorder outside of CUDA"
)


@records
def test_flight_recorder(group: None, tmp_path: Path) -> None:
    AbortTorchDistributed(str(tmp_path))(STATE)
    assert not dist.is_initialized()
    dump = pickle.loads((tmp_path / "iter_2" / "_dump_3").read_bytes())
    assert {"version", "pg_config"} <= set(dump)


def test_a_torch_without_a_flight_recorder(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(c10d, "_dump_fr_trace", raising=False)
    AbortTorchDistributed(str(tmp_path))(STATE)
    assert "has none here (no _dump_fr_trace)" in caplog.text
    assert not list(tmp_path.iterdir()) and not dist.is_initialized()


@records
def test_a_dump_that_cannot_be_written(group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    AbortTorchDistributed(str(tmp_path / "file"))(STATE)
    assert "the Flight Recorder's dump: NotADirectoryError" in caplog.text
    assert not dist.is_initialized()


def test_groups_that_came_meanwhile_are_forgotten(group: None) -> None:
    abort.reset_groups()
    assert not dist.is_initialized()
    abort.reset_groups()


def test_an_aborted_group_lives_until_it_is_let_go(group: None) -> None:
    """Else a DDP model may end it, and wait with the GIL held for a thread of the group that waits for the GIL."""
    world = weakref.ref(dist.group.WORLD)
    AbortTorchDistributed()(STATE)
    assert world() is not None
    abort.reset_groups()
    assert world() is None


CHECKPOINTS = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
BUFFERS = "transformer_engine.pytorch.module.base"


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A module of a package that is not installed here."""
    module = ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_packages_that_are_absent() -> None:
    assert AbortTransformerEngine()(STATE) is STATE
    assert AbortPersistentCheckpointProcesses()(STATE) is STATE


def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    fp8 = SimpleNamespace(reset=lambda: called.append("state"))
    stand_in(BUFFERS, monkeypatch, destroy_ub=lambda: called.append("buffers"))
    stand_in("transformer_engine.pytorch.fp8", monkeypatch, FP8GlobalStateManager=fp8)
    stand_in("transformer_engine.pytorch.quantization", monkeypatch)  # has no such class
    assert AbortTransformerEngine()(STATE) is STATE
    assert sorted(called) == ["buffers", "state"]


def test_checkpoint_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    stand_in(CHECKPOINTS, monkeypatch, abort_nvrx_checkpoint=lambda: called.append(1))
    assert AbortPersistentCheckpointProcesses()(STATE) is STATE
    assert called == [1]


def test_what_fails_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no")

    stand_in(BUFFERS, monkeypatch, destroy_ub=fail)
    assert AbortTransformerEngine()(STATE) is STATE
    assert f"{BUFFERS}.destroy_ub: ValueError: no" in caplog.text


def test_what_hangs_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    monkeypatch.setattr(abort, "_STEP_S", 0.02)
    stand_in(CHECKPOINTS, monkeypatch, abort_nvrx_checkpoint=over.wait)
    assert AbortPersistentCheckpointProcesses()(STATE) is STATE
    over.set()
    assert "abort_nvrx_checkpoint took longer than 0.02 s" in caplog.text
