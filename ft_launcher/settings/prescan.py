"""Reads from a command line what must be known before torch is imported, with the standard library only.

`cli.py` calls it first of all. Two things cannot wait: `OMP_NUM_THREADS`, which torch reads when it is imported, and
whether ranks can be forks, since the zygote is forked before our own modules are loaded. `settle_threads` corrects a
wrong guess when torch has counted the ranks.

This file knows torch's few flags without a value, not its parser. It counts GPUs by names in /proc and /dev: to ask a
driver might initialize CUDA, after which nothing can be forked.
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
"""The option for the number of ranks, and its variable."""
# torchrun's options without a value. An option that a later torch adds is guessed wrong, which costs the warm start
# only.
_TORCH_FLAGS = frozenset(
    {"-h", "--help", "-m", "--module", "--standalone", "--no-python", "--run-path", "--virtual-local-rank"}
)
# Where a node shows its GPUs: by the driver with UUIDs, and as devices without.
_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_UUID = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Scan:
    """What a scan of a command line found.

    Attributes:
        ranks: a guess of the ranks on this node; None: torch must count.
        starts_ranks: whether ranks will be started: not for help, nor for a dry run.
        against_forks: why ranks cannot be forks, as far as the command line and the environment show it; empty: they
            can.
        set_threads: whether `OMP_NUM_THREADS` was set by us.
    """

    ranks: int | None
    starts_ranks: bool
    against_forks: str = ""
    set_threads: bool = False


def scan(arguments: Sequence[str], environ: Mapping[str, str]) -> Scan:
    """Reads a command line without torch, as far as that is possible.

    Raises nothing for a wrong command line: `command_line.py` reports what is wrong, with torch's parser.
    """
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
    """Returns how many ranks of this node a value of `--nproc-per-node` means; None: only torch can count them.

    In the end torch's own count is used. A wrong guess only costs the warm start.
    """
    if value.isdecimal():
        return int(value)
    # By affinity, as recent releases of torch count: a container or Slurm may allow fewer processors than the machine
    # has.
    processors = len(os.sched_getaffinity(0))
    if value == "cpu":
        return processors
    if value in ("gpu", "auto"):
        gpus, _ = visible(environ.get("CUDA_VISIBLE_DEVICES"), gpu_uuids())
        return len(gpus) or (processors if value == "auto" else None)
    return None


def gpu_uuids() -> list[str | None]:
    """Returns one entry for each GPU of the node: its UUID, or None where that is not known."""
    found: list[str | None] = []
    for gpu in _names(_GPUS):
        try:
            match = _UUID.search((_GPUS / gpu / "information").read_text())
        except OSError:
            match = None
        found.append(match[1] if match else None)
    return found or [None for name in _names(_DEVICES) if _DEVICE.fullmatch(name)]


def _names(folder: Path) -> list[str]:
    """Returns the sorted names in a folder; empty where there is no such folder."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 (names are what is wanted)
    except OSError:
        return []


def prepare_threads(seen: Scan, environ: MutableMapping[str, str]) -> Scan:
    """Sets `OMP_NUM_THREADS` as torchrun would, for several ranks on a node. Returns the scan, which says whether it
    was set."""
    if (seen.ranks or 1) > 1 and _THREADS not in environ:
        environ[_THREADS] = "1"
        return replace(seen, set_threads=True)
    return seen


def settle_threads(seen: Scan, ranks: int, environ: MutableMapping[str, str]) -> str | None:
    """Corrects `OMP_NUM_THREADS` when torch has counted the ranks. Returns a line to show, or None."""
    if ranks > 1 and (seen.set_threads or _THREADS not in environ):
        environ[_THREADS] = "1"
        return f"{_THREADS}=1 in each of the {ranks} ranks, since it was not set"
    if seen.set_threads and ranks <= 1:
        del environ[_THREADS]
    return None


def _ranks(before: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the value of `--nproc-per-node`: the last on the command line, else the variable's, else 1."""
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
    """Returns why ranks cannot be forks, as far as command line and environment show it; empty: they can."""
    flag = options.flag_of(_WARM_START)
    spelled = [argument.removeprefix(f"{flag}=") for argument in halves.options if argument.startswith(f"{flag}=")]
    if (spelled or [environ.get(env.of_setting(_WARM_START), "")])[-1].strip().lower() == "off":
        return f"{flag}=off"
    no_python = any(_in_full(argument) == "--no-python" for argument in halves.options)
    return warm_start.against_command(() if no_python else halves.command, environ, sys.orig_argv)


def _in_full(argument: str) -> str:
    """Returns the option that an argument means, among the few that are known here, written with dashes; else the
    argument.

    argparse takes the beginning of an option for the option where no other begins so. Where a beginning fits several
    options of torch, torch reports an error, so the result here makes no difference then.
    """
    dashed = argument.replace("_", "-")
    known = [flag for flag in (*_TORCH_FLAGS, _RANKS[0]) if flag.startswith(dashed)]
    if len(known) == 1 and dashed.startswith("--"):
        return known[0]
    return dashed
