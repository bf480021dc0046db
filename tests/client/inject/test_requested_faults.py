"""Faults that the launcher was asked for, in a rank as it starts one: whatever the script is, it is not changed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.settings import injection
from rank_monitor.contract.settings.injection import InjectionReport
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.program import ended

IMPORTS_TORCH_S = 240.0

ITERATIONS = """
import ft_client as ft
client = ft.init()
for iteration in range(6):
    client.report_iteration(iteration)
    print(iteration, flush=True)
"""
STEPS = """
import ft_client as ft
for item in ft.steps(range(6)):
    with ft.section("save"):
        print(item, flush=True)
"""
HEARTBEATS = """
import ft_client as ft
client = ft.init()
for item in range(6):
    client.send_heartbeat()
    print(item, flush=True)
"""
BEFORE_MAIN = "print('ran', flush=True)\nwhile True:\n    pass\n"


def run(script: str, monitor: FakeMonitor, folder: Path, faults: str, **more: str) -> tuple[int, list[str], str]:
    """Exit code, what was printed, and stderr of rank 1 of 2."""
    rank = {"RANK": "1", "WORLD_SIZE": "2", env.INJECT: faults, **more}
    with started(script, folder, monitor.path, **rank) as process:
        code, out, err = ended(process)
        return code, out.split(), err


@pytest.mark.parametrize(
    ("script", "when", "printed", "at"),
    [
        (ITERATIONS, "step:3", "012", "at step 3"),
        (STEPS, "step:3", "012", "at step 3"),
        (STEPS, "section:save", "", "in section save"),
        (STEPS, "section:save,step:2", "01", "in section save"),
        (HEARTBEATS, "step:3", "01", "at step 3"),
        (ITERATIONS, "p:1", "", "at step 0"),
        (ITERATIONS, "step:9", "012345", ""),
        (ITERATIONS, "step:1,cycle:1", "012345", ""),
    ],
)
def test_the_fault_happens_where_the_training_is(
    monitor: FakeMonitor, tmp_path: Path, script: str, when: str, printed: str, at: str
) -> None:
    code, out, err = run(script, monitor, tmp_path, f"rank:0,kind:sigkill,p:1;rank:1,kind:exit,code:7,{when}")
    assert (code, out) == (7 if at else 0, list(printed)), err
    assert err == (f"FT: Simulating fault: exit; rank to fail: 1; {at}\n" if at else "")


def test_the_fault_happens_in_another_cycle(monitor: FakeMonitor, tmp_path: Path) -> None:
    faults = "rank:1,kind:exit,code:7,step:2,cycle:1"
    assert run(ITERATIONS, monitor, tmp_path, faults, **{env.CYCLE: "1"})[:2] == (7, ["0", "1"])


def test_the_fault_happens_after_a_delay(monitor: FakeMonitor, tmp_path: Path) -> None:
    code, _, err = run(BEFORE_MAIN, monitor, tmp_path, "rank:1,kind:exception,delay:0.3")
    assert code == 1 and err.splitlines()[-1] == (
        "ft_client.inject.injected_fault.FaultOnPurpose: a fault on purpose: rank:1,kind:exception,delay:0.3"
    )


@pytest.mark.parametrize("kind", ["exception", "oom"])
def test_the_fault_happens_at_the_start(monitor: FakeMonitor, tmp_path: Path, kind: str) -> None:
    code, _, err = run(BEFORE_MAIN, monitor, tmp_path, f"rank:1,kind:{kind}")
    assert code == 1 and err.startswith(f"FT: Simulating fault: {kind}; rank to fail: 1; after 0 s\nTraceback"), err


def test_the_variable_of_the_peers(monitor: FakeMonitor, tmp_path: Path) -> None:
    code, _, err = run(BEFORE_MAIN, monitor, tmp_path, "", **{env.SIMULATED_FAULT: "rank_killed;1;0.2"})
    assert code == -9 and err.startswith("FT: Simulating fault: rank_killed; rank to fail: 1; after 0.2")


def test_megatrons_own_integration_is_left_alone(monitor: FakeMonitor, tmp_path: Path) -> None:
    script = "import sys, time\nsys.modules['megatron.training.ft_integration'] = sys\ntime.sleep(0.5)\n"
    assert run(script, monitor, tmp_path, "", **{env.SIMULATED_FAULT: "rank_killed;1;0.1"}) == (0, [], "")


@pytest.mark.parametrize(
    ("name", "text"), [(env.INJECT, "kind:wrong"), (env.SIMULATED_FAULT, "rank_killed"), (env.SIMULATED_FAULT, "x;;y")]
)
def test_what_is_wrong_is_said_and_the_script_runs(monitor: FakeMonitor, tmp_path: Path, name: str, text: str) -> None:
    code, out, err = run("print('ran')", monitor, tmp_path, **{"faults": "", name: text})
    assert (code, out) == (0, ["ran"]) and err.startswith(f"ft_client: {name} does nothing: "), err


def test_children_of_the_rank_are_spared(monitor: FakeMonitor, tmp_path: Path) -> None:
    script = f"""
import os, sys
import ft_client as ft
client = ft.init()
print({env.INJECT!r} in os.environ, flush=True)
if os.fork() == 0:
    for iteration in range(6):
        client.report_iteration(iteration)
    print("spared", flush=True)
    os._exit(0)
os.wait()
for iteration in range(6):
    client.report_iteration(iteration)
"""
    code, out, _ = run(script, monitor, tmp_path, "rank:1,kind:exit,code:7,step:3")
    assert (code, out) == (7, ["False", "spared"])


def test_the_launcher_is_told(monitor: FakeMonitor, tmp_path: Path) -> None:
    fault = "rank:1,kind:kill_monitor,step:2"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(injection.socket_beside(monitor.path)))
        launcher.setblocking(False)
        code, out, err = run(ITERATIONS, monitor, tmp_path, fault, LOCAL_RANK="1")
        assert (code, out) == (0, list("012345"))
        assert err == "FT: Simulating fault: kill_monitor; rank to fail: 1; at step 2\n"
        assert InjectionReport.decode(launcher.recv(4096)) == InjectionReport(fault, 1, 1, "at step 2")


OPTIMIZERS = """
import sys
assert "torch" not in sys.modules
import torch
weight = torch.nn.Parameter(torch.ones(2))
fast, slow = torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight], lr=0.1)
for number in range(1, 6):
    weight.sum().backward()
    fast.step()
    slow.step()
    print(number, flush=True)
"""


def test_steps_of_optimizers_where_the_script_does_not_know_the_client(monitor: FakeMonitor, tmp_path: Path) -> None:
    """torch is imported by the script, not by us; two optimizers are no two steps."""
    rank = {"RANK": "1", "WORLD_SIZE": "2", env.INJECT: "rank:1,kind:exit,code:7,step:3"}
    with started(OPTIMIZERS, tmp_path, monitor.path, **rank) as process:
        code, out, err = ended(process, limit_s=IMPORTS_TORCH_S)
    assert (code, out.split()) == (7, ["1", "2"]), err
