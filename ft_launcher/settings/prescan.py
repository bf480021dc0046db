"""Reads from a command line what must be known before torch is imported, with the standard library only.

Knows the few flags of torch that take no value, not its parser; `settle_threads` corrects a wrong guess once torch is
imported. Counts GPUs by names in /proc and /dev: asking a driver might initialize CUDA.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ft_launcher.settings import command_line, options, warm_start
from ft_launcher.settings.visible_devices import visible
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError

_THREADS = "OMP_NUM_THREADS"
_WARM_START = "warm_start"
_RANKS = ("--nproc-per-node", "PET_NPROC_PER_NODE")
# torchrun's options without a value. An option that a later torch adds only costs the warm start.
_TORCH_FLAGS = frozenset(
    {"-h", "--help", "-m", "--module", "--standalone", "--no-python", "--run-path", "--virtual-local-rank"}
)
# Where a node shows its GPUs.
_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Scan:
    """The result of a scan: a guess of the ranks per node (None: torch must count), whether ranks will be started, why
    they cannot be forks as far as that is visible, and whether `OMP_NUM_THREADS` was set here."""

    ranks: int | None
    starts_ranks: bool
    against_forks: str = ""
    set_threads: bool = False


def scan(arguments: Sequence[str], environ: Mapping[str, str]) -> Scan:
    """Reads a command line without torch, as far as possible. Raises nothing for a wrong one."""
    try:
        halves = command_line.cut(
            arguments, lambda argument: "=" not in argument and _in_full(argument) not in _TORCH_FLAGS
        )
    except ConfigError:
        return Scan(None, starts_ranks=False)
    dry = options.flag_of("dry_run") + "=true"
    starts = bool(halves.command) and not {"-h", "--help", dry} & set(map(_in_full, halves.options))
    return Scan(guess_ranks(_ranks(halves.options, environ), environ), starts, _against_forks(halves, environ))


def guess_ranks(value: str, environ: Mapping[str, str]) -> int | None:
    """Returns how many ranks of this node a value of `--nproc-per-node` means; None if only torch can count them.

    torch's own count is used in the end; a wrong guess only costs the warm start.
    """
    if value.isdecimal():
        return int(value)
    # By affinity, as the count of recent torch: a container or Slurm may allow fewer than the machine has.
    processors = len(os.sched_getaffinity(0))
    if value == "cpu":
        return processors
    if value in ("gpu", "auto"):
        gpus, _ = visible(environ.get("CUDA_VISIBLE_DEVICES"), gpu_uuids())
        return len(gpus) or (processors if value == "auto" else None)
    return None


def gpu_uuids() -> list[str | None]:
    """Returns one entry per GPU of the node: its UUID, None where that is not known."""
    found: list[str | None] = []
    for gpu in _names(_GPUS):
        try:
            match = _UUID.search((_GPUS / gpu / "information").read_text())
        except OSError:
            match = None
        found.append(match[1] if match else None)
    return found or [None for name in _names(_DEVICES) if _DEVICE.fullmatch(name)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 (names are what is wanted)
    except OSError:
        return []


def prepare_threads(seen: Scan, environ: MutableMapping[str, str]) -> Scan:
    """Sets `OMP_NUM_THREADS` as torchrun would, since torch reads it when it is imported."""
    if (seen.ranks or 1) > 1 and _THREADS not in environ:
        environ[_THREADS] = "1"
        return replace(seen, set_threads=True)
    return seen


def settle_threads(seen: Scan, ranks: int, environ: MutableMapping[str, str]) -> str | None:
    """Corrects `OMP_NUM_THREADS` by the number of ranks that torch counted. Returns a line to show, or None."""
    if ranks > 1 and (seen.set_threads or _THREADS not in environ):
        environ[_THREADS] = "1"
        return f"{_THREADS}=1 in each of the {ranks} ranks, since it was not set"
    if seen.set_threads and ranks <= 1:
        del environ[_THREADS]
    return None


def _ranks(before: Sequence[str], environ: Mapping[str, str]) -> str:
    flag, variable = _RANKS
    text = environ.get(variable, "1")
    for place, argument in enumerate(before):
        name, joined, value = argument.partition("=")
        if _in_full(name) == flag:
            if joined:
                text = value
            else:
                text = "".join(before[place + 1 : place + 2])
    return text


def _against_forks(halves: command_line.SplitCommandLine, environ: Mapping[str, str]) -> str:
    flag = options.flag_of(_WARM_START)
    spelled = [argument.removeprefix(f"{flag}=") for argument in halves.options if argument.startswith(f"{flag}=")]
    if (spelled or [environ.get(env.of_setting(_WARM_START), "")])[-1].strip().lower() == "off":
        return f"{flag}=off"
    no_python = any(_in_full(argument) == "--no-python" for argument in halves.options)
    return warm_start.against_command(() if no_python else halves.command, environ, sys.orig_argv)


def _in_full(argument: str) -> str:
    """Returns the option of those known here that an argument means, with dashes; else the argument.

    argparse takes the beginning of an option for it where no other option begins so. One that begins another option of
    torch too is an error of the command line, which torch reports: what is returned for it makes no difference.
    """
    dashed = argument.replace("_", "-")
    known = [flag for flag in (*_TORCH_FLAGS, _RANKS[0]) if flag.startswith(dashed)]
    if len(known) == 1 and dashed.startswith("--"):
        return known[0]
    return dashed
