"""Limits learned over two real ranks: one process group of gloo, one monitor each."""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_client.rank.agreement import group
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import LimitsSet
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.program import ended

RANK = """
import json, os, time
import ft_client as ft
import torch.distributed as dist
from ft_client.rank.agreement import group

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
client = ft.init()
told = {}

def attempt(name, call):
    try:
        told[name] = call()
    except ft.RankMonitorClientError as error:
        told[name] = str(error)

told["max"] = group.max_over_ranks([rank, -rank, 2.5])
told["min"] = group.min_over_ranks([rank, -rank, 2.5])
told["range"] = group.range_over_ranks([rank, -rank, 2.5])
told["gather"] = group.gather_on_rank0([rank, 0.5])
told["from rank 0"] = group.from_rank0(rank + 0.25)
told["union"] = group.union_over_ranks(["both", "ä" * 100] if rank else ["both", "first"])
told["no names"] = group.union_over_ranks([])
told["json"] = group.gather_json({"rank": rank, "list": [1.5] * rank})
client.send_heartbeat()
if rank == 0:
    client.send_heartbeat()
attempt("one rank is not ready", client.calculate_and_set_hb_timeouts)
attempt("skipped", lambda: client.calculate_and_set_hb_timeouts(skip_if_not_ready=True))
time.sleep(0.2 * rank)
client.send_heartbeat()
attempt("ready", client.calculate_and_set_hb_timeouts)
with client.section("both"):
    time.sleep(0.2 * rank)
with client.section("only on %d" % rank):
    time.sleep(0.1)
attempt("sections", client.calculate_and_set_section_timeouts)
attempt("never", lambda: client.calculate_and_set_section_timeouts(["never"], calc_out_of_section=False))
told["state"] = client.state_dict()["current_timeouts"]
dist.destroy_process_group()
print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[FakeMonitor]]:
    folder = tmp_path_factory.mktemp("group")
    settings = MonitorSettings(learned_limit_floor=0.0, safety_factor=10.0)
    monitors, ranks = [], []
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            own = folder / str(rank)
            own.mkdir()
            monitors.append(FakeMonitor(own / "m", settings))
            stack.callback(monitors[-1].close)
            variables = {"RANK": str(rank), "STORE": str(folder / "store"), "GLOO_SOCKET_IFNAME": "lo"}
            ranks.append(stack.enter_context(started(RANK, own, own / "m", **variables)))
        results = []
        for process in ranks:
            _, out, err = ended(process, limit_s=120)
            assert process.returncode == 0, err
            results.append(json.loads(out))
        for monitor in monitors:
            monitor.wait_for(LimitsSet, 2)
    return results, monitors


Told = tuple[list[dict[str, Any]], list[FakeMonitor]]


def test_reductions(told: Told) -> None:
    for one in told[0]:
        assert one["max"] == [1.0, 0.0, 2.5]
        assert one["min"] == [0.0, -1.0, 2.5]
        assert one["range"] == [[0.0, 1.0], [-1.0, 0.0], [2.5, 2.5]]
        assert one["from rank 0"] == 0.25
        assert one["union"] == sorted(["both", "first", "ä" * 100])
        assert one["no names"] == []
        assert one["json"] == [{"rank": 0, "list": []}, {"rank": 1, "list": [1.5]}]
    assert [one["gather"] for one in told[0]] == [[[0.0, 0.5], [1.0, 0.5]], None]


def test_all_ranks_decide_alike_whether_they_are_ready(told: Told) -> None:
    for one in told[0]:
        assert "at least two signs of life on every rank" in one["one rank is not ready"]
        assert one["skipped"] is False
        assert one["ready"] is True
        assert one["never"] == "no rank has seen any of: section:never"


def test_limits_are_the_maximum_over_ranks_and_the_same_everywhere(told: Told) -> None:
    first, second = (one["state"] for one in told[0])
    assert first == second
    assert first["heartbeat"]["subsequent"] >= 2.0
    assert first["section"]["section"]["both"] >= 2.0
    assert first["section"]["calculated_sections"] == ["both", "only on 0", "only on 1"]
    assert first["section"]["is_out_of_section_calculated"]


def test_each_monitor_is_told(told: Told) -> None:
    limits = [monitor.messages(LimitsSet)[-1] for monitor in told[1]]
    assert limits[0] == limits[1]
    assert limits[0].state["current_timeouts"] == told[0][0]["state"]


@pytest.mark.parametrize(
    ("config", "device"), [("cpu:gloo,meta:fake", "cpu"), ("meta:fake", "meta"), ("cpu:gloo", "cpu")]
)
def test_the_device_is_that_of_the_groups_backend(config: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for that of a GPU: torch has it everywhere."""
    devices: list[torch.device] = []
    backend = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        get_backend_config=lambda: config,
        gather=lambda tensor, rows, dst: devices.append(tensor.device),
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", backend)  # type: ignore[arg-type]
    assert group.gather_on_rank0([1.0]) is None
    assert devices == [torch.device(device)]
