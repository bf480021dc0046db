"""A rank that uses its GPU and writes down what it saw, into the folder that is its argument.

In cycle 0 all ranks keep their memory until the file `go` is there; then rank 0 dies by SIGKILL.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

FORKED = "libtorch" in Path("/proc/self/maps").read_text()
BEGAN = time.monotonic()
HELD_MIB = 2048
MIB = 1 << 20


def in_use_mib() -> float:
    """Of all GPUs together, as the driver says."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return sum(float(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles) / MIB


def main(folder: Path) -> None:
    import torch

    rank, cycle = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    facts = {"pid": os.getpid(), "forked": FORKED, "initialised": torch.cuda.is_initialized()}
    facts["in_use_mib"] = in_use_mib()
    facts["devices"] = torch.cuda.device_count()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    ones = torch.ones(512, 512, device=device)
    facts["sum"] = (ones @ ones).sum().item()
    facts["to_first_product_s"] = time.monotonic() - BEGAN
    held = torch.ones(HELD_MIB * MIB, dtype=torch.uint8, device=device)
    facts["held_mib"] = held.numel() / MIB
    facts["kept_by_the_driver_mib"] = in_use_mib()
    written = folder / f"writes-{cycle}-{rank}"
    written.write_text(json.dumps(facts))
    written.rename(folder / f"facts-{cycle}-{rank}")
    while cycle == 0:
        if rank == 0 and (folder / "go").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


main(Path(sys.argv[1]))
