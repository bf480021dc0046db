"""The script every rank of every launcher runs: does one scenario's part and stamps what happened.

It must not know which launcher started it (the client's package comes from the environment) nor import anything of
the benchmark: launchers run it by its path.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
CYCLE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
FOLDER = Path(os.environ["BENCH_FOLDER"])
GIVE_UP_S = 120.0


def stamp(event: str, cycle: int = CYCLE) -> None:
    """Append one line with the system-wide monotonic clock; a single `write` of a short line is atomic."""
    line = {"event": event, "rank": RANK, "cycle": cycle, "pid": os.getpid(), "t": time.monotonic_ns()}
    fd = os.open(FOLDER / "stamps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def wait_for(name: str, while_waiting: Callable[[], object] = lambda: None, every_s: float = 0.02) -> None:
    """Wait until the runner makes the file `name`."""
    deadline = time.monotonic() + GIVE_UP_S
    while not (FOLDER / name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"the runner did not make {name} within {GIVE_UP_S:g} s")
        while_waiting()
        time.sleep(every_s)


def make_client() -> Any:
    """The client of this launcher, connected; the classes of both packages have the same methods."""
    client = importlib.import_module(os.environ["BENCH_CLIENT"]).RankMonitorClient()
    client.init_workload_monitoring()
    return client


def make_group() -> None:
    """A gloo group, which connects to all ranks before it returns."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    stamp("ready")


def launch() -> None:
    """P1: make the group, end when told."""
    make_group()
    wait_for("go")
    dist.destroy_process_group()


def crash(crashes: int, ignore_sigterm: bool = False) -> None:
    """P2, P10: one rank kills itself in each cycle, the last cycle ends well."""
    if ignore_sigterm and RANK > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    make_group()
    wait_for(f"go.{CYCLE}")
    if crashes <= CYCLE:
        return
    victim = CYCLE % WORLD
    if ignore_sigterm:
        victim = 0
    if victim == RANK:
        time.sleep(0.2)
        stamp("crash")
        os.kill(os.getpid(), signal.SIGKILL)
    if ignore_sigterm:
        time.sleep(GIVE_UP_S)
    dist.barrier()


def first_step(crashes: int) -> None:
    """P2b: as `crash`, with the first step of a DDP model in each cycle."""
    make_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    stamp("stepped")
    if CYCLE == 0 and os.environ.get("BENCH_CLIENT"):
        make_client().report_iteration(0)  # where this is missing, the launcher learns 30 s after the group
    wait_for(f"go.{CYCLE}")
    if crashes > CYCLE and CYCLE % WORLD == RANK:
        stamp("crash")
        os.kill(os.getpid(), signal.SIGKILL)
    if crashes > CYCLE:
        dist.barrier()


def hang(kind: str, jitter_s: float) -> None:
    """P5: show life for a moment of random length, stamp the last sign, stand still."""

    def on_signal(_number: int, _frame: object) -> None:
        stamp("signalled")
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGUSR2, on_signal)
    client = make_client()
    stamp("ready")
    deadline = time.monotonic() + random.uniform(0.2, 0.2 + jitter_s)
    while time.monotonic() < deadline:
        if kind == "heartbeat":
            client.send_heartbeat()
        time.sleep(0.1)
    stamp("life")
    if kind == "heartbeat":
        client.send_heartbeat()
    else:
        client.start_section("work")
    time.sleep(GIVE_UP_S)


def calls(count: int) -> None:
    """P6: the cost of each call, back to back and with pauses, then with the monitor stopped."""
    client = make_client()

    def section() -> None:
        client.start_section("work")
        client.end_section("work")

    stamp("ready")
    wait_for("go")
    time_calls("heartbeat", client.send_heartbeat, count)
    time_calls("section", section, count)
    time_calls("heartbeat_paced", client.send_heartbeat, count // 10, pause_s=0.001)
    stamp("timed")
    wait_for("stopped")
    time_calls("heartbeat_stopped", client.send_heartbeat, count)
    time_calls("section_stopped", section, count)
    stamp("timed_stopped")
    wait_for("end")


def time_calls(name: str, call: Callable[[], object], count: int, pause_s: float = 0.0) -> None:
    """Write the nanoseconds of each of `count` calls to `<name>.<rank>.bin` (signed 64 bit)."""
    took = array.array("q", bytes(8 * count))
    for index in range(count):
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter_ns()
        call()
        took[index] = time.perf_counter_ns() - start
    (FOLDER / f"{name}.{RANK}.bin").write_bytes(took.tobytes())


def beat() -> None:
    """P7: ten heartbeats a second where there is a client."""
    call = make_client().send_heartbeat if os.environ.get("BENCH_CLIENT") else lambda: None
    stamp("ready")
    wait_for("end", while_waiting=call, every_s=0.1)


def straggler(entries: int, kinds: list[int], reports: int) -> None:
    """P13: entries of a section, not timed and timed; then reports on so many kinds of kernels, and bare collectives.

    There is no GPU in this: each kind of kernel gets a hundred made-up durations and a name as long as real ones.
    """
    detector = importlib.import_module("ft_client.straggler").Detector
    make_group()

    def section() -> None:
        with detector.detection_section("work"):
            pass

    for name, interval in (("section_untimed", 2 * entries), ("section_timed", 1)):
        detector.initialize(profiling_interval=interval)
        time_calls(name, section, entries)
    for count in kinds:
        detector.initialize()
        cpu_ns = array.array("q")
        for index in range(reports + 1):  # in report 0 the names travel
            section()
            detector._now.kernels.take(made_up_kernels(count))
            dist.barrier()
            before_ns = time.process_time_ns()
            time_calls(f"report_{count}_kinds.{index}", detector.generate_report, 1)
            cpu_ns.append(time.process_time_ns() - before_ns)
            dist.barrier()  # nobody makes up further kernels while another rank still reports
        (FOLDER / f"report_{count}_kinds_cpu.{RANK}.bin").write_bytes(cpu_ns.tobytes())
        for index in range(reports):
            dist.barrier()
            time_calls(f"bare_{count}_kinds.{index}", lambda count=count: bare_collectives(count), 1)
    stamp("timed")
    wait_for("end")


def made_up_kernels(count: int) -> Iterator[Any]:
    """Events as torch's profiler gives them: a hundred of each kind."""
    device = SimpleNamespace(name="CUDA")
    for index in range(count):
        name = f"void kernel_{index}<{'a_long_type, ' * 16}>()"
        for duration_us in range(100, 200):
            took = SimpleNamespace(elapsed_us=lambda duration_us=duration_us: float(duration_us))
            yield SimpleNamespace(name=name, device_type=device, time_range=took, is_user_annotation=False)


def bare_collectives(count: int) -> None:
    """The two collectives of a report with nothing around them."""
    dist.all_reduce(torch.zeros(count + 2, dtype=torch.float64), op=dist.ReduceOp.MIN)
    row = torch.zeros(4, dtype=torch.float64)
    if RANK == 0:
        dist.gather(row, [torch.empty_like(row) for _ in range(WORLD)])
    else:
        dist.gather(row)


def rerun(steps: int) -> None:
    """P13: steps of one check with the rerun machine, with preemption's too, and with bare all-reduces instead."""
    machine = importlib.import_module("ft_client.rerun").RerunStateMachine(mode="validate_results")
    make_group()
    loss = torch.tensor(1.0)
    guard = importlib.import_module("ft_client.preemption").PreemptionGuard(sig=signal.SIGUSR1)

    def step() -> None:
        while machine.should_run_forward_backward(None):
            machine.validate_result(loss, torch.isnan, "loss is NaN")

    def step_and_stop() -> None:
        step()
        guard.check()

    def bare_step(*counts: int) -> None:
        if not torch.isnan(loss):
            for count in counts:
                votes = torch.zeros(count, dtype=torch.float64)
                dist.all_reduce(votes, op=dist.ReduceOp.MAX)
                votes.tolist()

    before_ns = time.process_time_ns()
    time_calls("step", step, steps)
    (FOLDER / f"steps_cpu.{RANK}.bin").write_bytes(array.array("q", [time.process_time_ns() - before_ns]).tobytes())
    with guard:
        time_calls("step_and_stop", step_and_stop, steps)
    time_calls("bare_step", lambda: bare_step(4), steps)
    time_calls("bare_step_and_stop", lambda: bare_step(4, 1), steps)
    stamp("timed")
    wait_for("end")


def main() -> None:
    """Run the part named by the first argument."""
    stamp("start")
    mode, *arguments = sys.argv[1:]
    if mode == "launch":
        launch()
    elif mode in ("crash", "stubborn"):
        crash(int(arguments[0]), ignore_sigterm=mode == "stubborn")
    elif mode == "first_step":
        first_step(int(arguments[0]))
    elif mode == "hang":
        hang(arguments[CYCLE], float(arguments[-1]))
    elif mode == "calls":
        calls(int(arguments[0]))
    elif mode == "beat":
        beat()
    elif mode == "rerun":
        rerun(int(arguments[0]))
    elif mode == "straggler":
        straggler(int(arguments[0]), [int(text) for text in arguments[1].split(",")], int(arguments[2]))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
