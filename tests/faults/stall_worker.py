"""A rank of a training with gloo that makes steps until the file `done` is in its folder. Run as a script."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ft_client as ft
from tests.groups import end_groups

STEP_S = 0.05


def main(folder: Path) -> None:
    """Trains; each step is one collective of all ranks, by which rank 0 tells the others of the end."""
    dist.init_process_group("gloo")
    for _ in ft.steps(iter(int, 1), start=0):
        time.sleep(STEP_S)
        is_over = torch.tensor(float(dist.get_rank() == 0 and (folder / "done").exists()))
        dist.all_reduce(is_over)
        if is_over:
            break
    ft.shutdown()
    end_groups()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main(Path(sys.argv[1]))
