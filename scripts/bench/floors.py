"""Measures the least work that does the same as a launcher: nothing can be faster. Knows nothing of launchers."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta

from .job import deaths, memory_mib
from .launchers import ROOT
from .ports import free_port
from .scenario import Outcome

TORCH_PROCESS = """
import os, sys, time
import torch
print(time.monotonic_ns(), flush=True)
sys.stdin.read()
print(time.monotonic_ns(), flush=True)
os._exit(0)
"""


def torch_process(by_signal: bool) -> tuple[float, float]:
    """Seconds from before exec to the end of `import torch`, and from SIGKILL or `os._exit` to the death seen."""
    start = time.monotonic_ns()
    with subprocess.Popen([sys.executable, "-c", TORCH_PROCESS], stdin=-1, stdout=-1, text=True) as child:
        stdin, stdout = child.stdin, child.stdout
        assert stdin and stdout
        imported = int(stdout.readline())

        if by_signal:
            last = time.monotonic_ns()
            dead = deaths([child.pid], child.kill)[child.pid]
        else:
            dead = deaths([child.pid], stdin.close)[child.pid]
            last = int(stdout.readline())
    return (imported - start) / 1e9, (dead - last) / 1e9


def launch(_ranks: int, outcome: Outcome) -> None:
    """P1: one `import torch`; P1b: the end by `os._exit` of a process that has it loaded."""
    import_s, exit_s = torch_process(by_signal=False)
    outcome.add("launch_s", import_s)
    outcome.add("exit_s", exit_s)


def hang(_ranks: int, outcome: Outcome) -> None:
    """P5: SIGKILL to the death of a process with torch loaded."""
    _, death_s = torch_process(by_signal=True)
    outcome.add("heartbeat_dead_ms", death_s * 1000)
    outcome.add("section_dead_ms", death_s * 1000)


def crash(ranks: int, outcome: Outcome) -> None:
    """P2: `fork_group` in a process that has torch loaded."""
    command = [sys.executable, "-m", "scripts.bench.floors", str(ranks)]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=90)
    outcome.add("recover_s", float(run.stdout))


def fork_group(ranks: int) -> float:
    """Fork the ranks, each makes the gloo group over a fresh store: seconds to the last."""
    import torch.distributed as dist

    url = f"tcp://127.0.0.1:{free_port()}"
    reader, writer = os.pipe()
    start = time.monotonic_ns()
    for rank in range(ranks):
        if os.fork() == 0:
            signal.alarm(60)
            dist.init_process_group("gloo", url, rank=rank, world_size=ranks, timeout=timedelta(seconds=20))
            os.write(writer, struct.pack("q", time.monotonic_ns()))
            dist.barrier()
            os._exit(0)
    os.close(writer)
    ends = [struct.unpack("q", os.read(reader, 8))[0] for _ in range(ranks)]
    for _ in range(ranks):
        os.wait()
    last: int = max(ends)
    return (last - start) / 1e9


def restart(ranks: int, outcome: Outcome) -> None:
    """P8: `fork_barriers` in a process that has torch loaded; with a group after them for gloo."""
    command = [sys.executable, "-m", "scripts.bench.floors", str(ranks), "barriers"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=90)
    barriers_s, ready_s = map(float, run.stdout.split())
    outcome.add("restart_ms", barriers_s * 1000)
    outcome.add("gloo_restart_ms", barriers_s * 1000)
    outcome.add("gloo_ready_ms", ready_s * 1000)


def fork_barriers(ranks: int) -> tuple[float, float]:
    """Ranks that wait for a key in a store go through two barriers, then make a gloo group: seconds to the last."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))  # the server's threads begin when nothing is forked any more
    port = listener.getsockname()[1]
    url = f"tcp://127.0.0.1:{free_port()}"
    reader, writer = os.pipe()
    signal.alarm(60)
    for rank in range(ranks):
        if os.fork() == 0:
            signal.alarm(60)
            store = dist.TCPStore("127.0.0.1", port, None, False)
            store.add("connected", 1)
            store.wait(["fault"])
            for name in ("end", "start"):
                if store.add(name, 1) == ranks:
                    store.set(f"{name}ed", "")
                store.wait([f"{name}ed"])
            through = time.monotonic_ns()
            dist.init_process_group("gloo", url, rank=rank, world_size=ranks, timeout=timedelta(seconds=20))
            os.write(writer, struct.pack("qq", through, time.monotonic_ns()))
            dist.barrier()
            os._exit(0)
    served = listener.detach()
    server = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=served)
    while server.add("connected", 0) < ranks:
        time.sleep(0.01)
    time.sleep(0.2)
    start = time.monotonic_ns()
    server.set("fault", "")
    through, ready = map(max, zip(*(struct.unpack("qq", os.read(reader, 16)) for _ in range(ranks)), strict=True))
    for _ in range(ranks):
        os.wait()
    return (through - start) / 1e9, (ready - start) / 1e9


def calls(_ranks: int, outcome: Outcome) -> None:
    """P6: `send` of 16 bytes over a SEQPACKET pair to another process, back to back and with pauses."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = os.fork()
    if receiver == 0:
        near.close()
        while far.recv(64):
            pass
        os._exit(0)
    far.close()
    for name, count, pause_s in (("heartbeat", 2000, 0.0), ("heartbeat_paced", 200, 0.001)):
        took = []
        for _ in range(count):
            if pause_s:
                time.sleep(pause_s)
            start = time.perf_counter_ns()
            near.send(b"0123456789abcdef")
            took.append(time.perf_counter_ns() - start)
        outcome.add_percentiles(name, took)
    near.close()
    os.waitpid(receiver, 0)


def straggler(_ranks: int, outcome: Outcome) -> None:
    """P13: a `with` of a context manager written in Python that does nothing."""

    class Nothing:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    nothing = Nothing()
    took = []
    for _ in range(20000):
        start = time.perf_counter_ns()
        with nothing:
            pass
        took.append(time.perf_counter_ns() - start)
    outcome.add_percentiles("section_untimed", took)


def rerun(_ranks: int, outcome: Outcome) -> None:
    """P13: the check alone."""
    import torch

    loss, took = torch.tensor(1.0), []
    for _ in range(2000):
        start = time.perf_counter_ns()
        bool(torch.isnan(loss))
        took.append(time.perf_counter_ns() - start)
    outcome.add_percentiles("step", took)


def sidecars(_ranks: int, outcome: Outcome) -> None:
    """P7: an interpreter that only waits."""
    with subprocess.Popen([sys.executable, "-ISc", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout
        child.stdout.readline()
        pss, private = memory_mib(child.pid)
        child.kill()
    outcome.add("monitor_pss_MiB", pss)
    outcome.add("monitor_private_MiB", private)


def idle(_ranks: int, outcome: Outcome) -> None:
    """P1c: one process that has torch loaded."""
    with subprocess.Popen([sys.executable, "-c", TORCH_PROCESS], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout
        child.stdout.readline()
        outcome.add("all_pss_MiB", memory_mib(child.pid)[0])
        child.kill()


def nothing(_ranks: int, _outcome: Outcome) -> None:
    """Where there is no floor but the launchers themselves."""


if __name__ == "__main__":
    if "barriers" in sys.argv:
        print(*fork_barriers(int(sys.argv[1])))
    else:
        print(fork_group(int(sys.argv[1])))
