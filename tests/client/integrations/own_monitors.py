"""A program that starts a monitor and ranks by itself, as the documented API of `nvidia_resiliency_ext` has it.

Each word of its command line but the first is one rank after the other: `hangs`, `trains` or `learns`; `waits` lets the
program wait until it is killed. It prints what became of each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

from nvidia_resiliency_ext import fault_tolerance
from nvidia_resiliency_ext.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR


def rank(socket: str, what: str) -> None:
    """One rank."""
    os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR] = socket
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    for _ in range(3):
        client.send_heartbeat()
    if what == "hangs":
        time.sleep(600)
    if what == "learns":
        client.calculate_and_set_hb_timeouts()
        print(client.cfg.rank_heartbeat_timeout, client.hb_timeouts.subsequent, flush=True)
    client.shutdown_workload_monitoring()


def main(socket: str, *words: str) -> None:
    """The program."""
    config = fault_tolerance.FaultToleranceConfig(rank_heartbeat_timeout=2.0)
    context = multiprocessing.get_context("spawn")
    monitor = fault_tolerance.RankMonitorServer.run_in_subprocess(config, socket, mp_ctx=context)
    for word in words:
        if word == "waits":
            print("waits", flush=True)
            time.sleep(600)
        process = context.Process(target=rank, args=(socket, word))
        process.start()
        process.join()
        print(word, process.exitcode, flush=True)
    monitor.terminate()
    monitor.join()
    print("monitor", monitor.exitcode, Path(socket).exists(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
