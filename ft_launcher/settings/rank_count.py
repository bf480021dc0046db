"""Guesses how many ranks a value of `--nproc-per-node` means, with the standard library only.

torch's own count is used in the end; a wrong guess only costs the warm start. Reads names in /proc and /dev: asking a
driver might initialize CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.health.visible_devices import visible

_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class RankPlaces:
    """Where a node shows its GPUs."""

    gpus: Path = Path("/proc/driver/nvidia/gpus")
    devices: Path = Path("/dev")


def guess(value: str, environ: Mapping[str, str], places: RankPlaces = RankPlaces()) -> int | None:
    """Returns the number of ranks of this node; None if only torch can count them."""
    if value.isdecimal():
        return int(value)
    # By affinity, as the count of recent torch: a container or Slurm may allow fewer than the machine has.
    processors = len(os.sched_getaffinity(0))
    if value == "cpu":
        return processors
    if value in ("gpu", "auto"):
        gpus, _ = visible(environ.get("CUDA_VISIBLE_DEVICES"), gpu_uuids(places))
        return len(gpus) or (processors if value == "auto" else None)
    return None


def gpu_uuids(places: RankPlaces = RankPlaces()) -> list[str | None]:
    """Returns one entry per GPU of the node: its UUID, None where that is not known."""
    found: list[str | None] = []
    for gpu in _names(places.gpus):
        try:
            match = _UUID.search((places.gpus / gpu / "information").read_text())
        except OSError:
            match = None
        found.append(match[1] if match else None)
    return found or [None for name in _names(places.devices) if _DEVICE.fullmatch(name)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 (names are what is wanted)
    except OSError:
        return []
