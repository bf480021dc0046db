"""What must be known of a command line before torch is imported, by the standard library alone.

Knows the few flags of torch that take no value, not its parser; a wrong guess is put right by `settle_threads` once
torch is there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from ft_launcher import command_line, options, rank_count, warm_start
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError

_THREADS = "OMP_NUM_THREADS"
_WARM_START = "warm_start"
_RANKS = ("--nproc-per-node", "PET_NPROC_PER_NODE")
_TORCH_FLAGS = frozenset(
    {"-h", "--help", "-m", "--module", "--standalone", "--no-python", "--run-path", "--virtual-local-rank"}
)


@dataclass(frozen=True)
class Scan:
    """What was seen: a guess of the ranks per node (None: torch must count), whether ranks will be started, why they
    cannot be forks as far as that is seen, and whether `OMP_NUM_THREADS` was set here."""

    ranks: int | None
    starts_ranks: bool
    against_forks: str = ""
    set_threads: bool = False


def scan(words: Sequence[str], environ: Mapping[str, str]) -> Scan:
    """Reads a command line without torch, as well as that goes; never complains."""
    try:
        halves = command_line.cut(words, lambda word: "=" not in word and _dashed(word) not in _TORCH_FLAGS)
    except ConfigError:
        return Scan(None, starts_ranks=False)
    dry = options.flag_of("dry_run") + "=true"
    starts = bool(halves.rest) and not {"-h", "--help", dry} & set(halves.options)
    return Scan(rank_count.guess(_ranks(halves.options, environ), environ), starts, _against_forks(halves, environ))


def prepare_threads(seen: Scan, environ: MutableMapping[str, str]) -> Scan:
    """Sets `OMP_NUM_THREADS` as torchrun would, since torch reads it when it is imported."""
    if (seen.ranks or 1) > 1 and _THREADS not in environ:
        environ[_THREADS] = "1"
        return replace(seen, set_threads=True)
    return seen


def settle_threads(seen: Scan, ranks: int, environ: MutableMapping[str, str]) -> str | None:
    """Puts `OMP_NUM_THREADS` right by the number of ranks that torch found; returns one line to show, or None."""
    if ranks > 1 and (seen.set_threads or _THREADS not in environ):
        environ[_THREADS] = "1"
        return f"{_THREADS}=1 in each of the {ranks} ranks, since it was not set"
    if seen.set_threads and ranks <= 1:
        del environ[_THREADS]
    return None


def _ranks(before: Sequence[str], environ: Mapping[str, str]) -> str:
    flag, variable = _RANKS
    text = environ.get(variable, "1")
    for place, word in enumerate(before):
        name, joined, value = word.partition("=")
        if _dashed(name) == flag:
            text = value if joined else "".join(before[place + 1 : place + 2])
    return text


def _against_forks(halves: command_line.Cut, environ: Mapping[str, str]) -> str:
    flag = options.flag_of(_WARM_START)
    given = [word.removeprefix(f"{flag}=") for word in halves.options if word.startswith(f"{flag}=")]
    if (given or [environ.get(env.of_setting(_WARM_START), "")])[-1].strip().lower() == "off":
        return f"{flag}=off"
    no_python = any(_dashed(word) == "--no-python" for word in halves.options)
    return warm_start.against_command(() if no_python else halves.rest, environ, sys.orig_argv)


def _dashed(word: str) -> str:
    return word.replace("_", "-")
