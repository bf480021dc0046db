"""The peer's fault tools: which of ours each fault is, who is drawn, and the exception that waits for a look."""

from __future__ import annotations

import random

import pytest

from ft_client.integrations.nvrx_alias import inject_fault as tools
from ft_client.integrations.nvrx_alias.inject_fault import Fault
from rank_monitor.contract.settings import injection

WORLD = 6


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Fault, float]]:
    """What would be injected into this rank, which is rank 3 of six."""
    found: list[tuple[Fault, float]] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    monkeypatch.setattr(tools, "dispatch_fault_injection", lambda fault, delay, _: found.append((fault, delay)))
    return found


def test_each_fault_is_one_of_ours() -> None:
    kinds = {fault.name: injection.kind_of(fault.name) for fault in Fault}
    assert len(kinds) == 12 and set(kinds.values()) <= set(injection.KINDS)
    assert (kinds["LOCK_GIL"], kinds["SIGNAL_EXC"], kinds["GPU_SLEEP"]) == ("gil_sleep", "exception", "sleep")
    assert [fault.value for fault in Fault] == list(range(1, 13)), "values travel between ranks"


def test_one_rank_or_all_or_none(dispatched: list[tuple[Fault, float]]) -> None:
    everybody = {"faults": (Fault.SIGKILL,), "keep_alive": 0, "delay": 2.5, "seed": 1}
    tools.inject_fault(num_faults=WORLD, **everybody)  # type: ignore[arg-type]
    assert dispatched == [(Fault.SIGKILL, 2.5)]
    tools.inject_fault(num_faults=WORLD, **{**everybody, "keep_alive": 4})  # type: ignore[arg-type]
    tools.inject_fault(num_faults=0, **everybody)  # type: ignore[arg-type]
    tools.inject_fault(num_faults=1, **{**everybody, "keep_alive": WORLD + 1})  # type: ignore[arg-type]
    assert len(dispatched) == 1, "rank 3 was spared"


def test_all_ranks_draw_the_same(dispatched: list[tuple[Fault, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(10**6)
    for rank in range(WORLD):
        monkeypatch.setenv("RANK", str(rank))
        tools.inject_fault((Fault.SIGTERM, Fault.SEGFAULT, Fault.OS_ABORT), (2, 3), 1, (1.0, 4.0), seed)
    assert 2 <= len(dispatched) <= 3 and len(set(dispatched)) == 1, seed
    assert 1.0 <= dispatched[0][1] <= 4.0, seed


def test_the_exception_of_the_workload_waits_for_a_look(capfd: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    tools.maybe_raise_workload_exception()
    tools.dispatch_fault_injection(fault=Fault.WORKLOAD_EXC, delay=3600.0, callback=None)
    tools.maybe_raise_workload_exception()
    tools.dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.0, lambda: called.append("here"))
    with pytest.raises(tools.InjectedException):
        tools.maybe_raise_workload_exception()
    tools.maybe_raise_workload_exception()
    tools.dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.0)
    tools.clear_workload_exception()
    tools.maybe_raise_workload_exception()
    assert called == ["here"] and "FT: Simulating fault: WORKLOAD_EXC" in capfd.readouterr().err


def test_what_is_no_fault() -> None:
    with pytest.raises(ValueError, match="fault='SIGKILL' must be one of GPU_ERROR"):
        tools.dispatch_fault_injection("SIGKILL", 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="delay_s=-1"):
        tools.dispatch_fault_injection(Fault.SIGKILL, -1.0)
