"""How many ranks the word after `--nproc-per-node` will come to, by the standard library alone.

torch's own count holds; a guess that turns out wrong costs the warm start. Reads names in /proc and /dev: no driver is
asked, since that may touch CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_launcher.health.visible_gpus import visible

_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Places:
    """Where a node shows its GPUs."""

    gpus: Path = Path("/proc/driver/nvidia/gpus")
    devices: Path = Path("/dev")


def guess(word: str, environ: Mapping[str, str], places: Places = Places()) -> int | None:
    """Ranks of this node; None: only torch can tell."""
    if word.isdecimal():
        return int(word)
    processors = len(os.sched_getaffinity(0))
    if word == "cpu":
        return processors
    if word in ("gpu", "auto"):
        gpus, _ = visible(environ.get("CUDA_VISIBLE_DEVICES"), gpu_uuids(places))
        return len(gpus) or (processors if word == "auto" else None)
    return None


def gpu_uuids(places: Places = Places()) -> list[str | None]:
    """One per GPU of the node, where it is known."""
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
