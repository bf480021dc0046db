"""What the programs of `test_functions.py` share: functions that ranks run. Each program is this and a main part."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ft_launcher import LaunchConfig, launch  # noqa: F401 (used by the main parts)


class Box:
    """A class of the program's own, in arguments and return values."""

    def __init__(self, value):
        self.value = value


def works(a, b, memory, tensor, queue):
    rank = int(os.environ["RANK"])
    memory.buf[rank] = tensor[rank] = rank + 1
    queue.put(os.environ["RANK"])
    return rank * 100 + a + b.value, Box(os.environ["WORLD_SIZE"]), sums()


def is_forked():
    """Whether this rank is a fork of the zygote: what was executed for it has the bootstrap as its main program."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return not frame.f_code.co_filename.endswith("bootstrap.py")


def raises():
    if os.environ["RANK"] == "1":
        raise ValueError("the batch is empty")
    time.sleep(600)


def dies_once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def dies_once_and_sums():
    return dies_once(), sums().item()


def hangs():
    from ft_client import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat()
    time.sleep(600)


def sums():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total


def exits_or_leaves_a_thread():
    if os.environ["RANK"] == "0":
        exits()
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "done"


def leaves_at_once():
    os._exit(0)


def exits():
    sys.exit(0)


def returns_a_lock():
    return threading.Lock()


def says_up_and_waits(file, *handled):
    if handled:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(file + os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def when_up(file, ranks, then):
    """Calls `then` in a thread once so many ranks are there."""

    def wait():
        files = [Path(f"{file}{rank}") for rank in range(ranks)]
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.01)
        then()

    threading.Thread(target=wait, daemon=True).start()
