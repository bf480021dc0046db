"""Our options: which exist, their spellings, and their help.

The command line, YAML, environment and `LaunchConfig` look their names up here. Knows neither torch nor where a command
line ends. Values stay text: `rank_monitor.contract.settings.declaration` reads
them.
"""

from __future__ import annotations

import difflib
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterable
from typing import Any

from ft_launcher.settings import nvrx_flags
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings import config, kinds
from rank_monitor.contract.settings.declaration import Declaration, declarations, default_of

GROUP_OF: dict[str, type] = {key: group for group in config.GROUPS.values() for key in declarations(group)}
"""Key of a setting -> its group."""

# Batch scripts and configurations written for NVIDIA's launcher and for Flyte have these names.
ALIASES = {
    "term_timeout": "preemption_grace",
    "storage_healthcheck_path": "storage_health_check_path",
    "nccl_collective_timeout_sec": "nccl_collective_timeout",
    "nccl_heartbeat_timeout_sec": "nccl_heartbeat_timeout",
}
"""Other names of settings -> key."""

REPEATED = frozenset({"inject"})
"""Settings of which each option on the command line adds one; of all others the last holds."""

# Batch scripts for NVIDIA's launcher spell these options without our prefix.
_WITHOUT_PREFIX = {
    "--fault-tol-cfg-path": "cfg_path",
    "--ignore-missing-fault-tol-cfg": "ignore_missing_cfg",
    "--restart-policy": "restart_policy",
    "--workers-stop-timeout": "workers_stop_timeout",
    "--term-timeout": "preemption_grace",
}
_OURS = ("--ft-", "--fault-tol")


class UsageError(ConfigError):
    """The command line as a whole is wrong, not one value of it."""

    def __init__(self, problem: str, hint: str = "See ft_launcher --help") -> None:
        super().__init__("command line", "", "command line", problem, hint)
        self.args = (f"{problem}. {hint}",)


def declaration_of(key: str) -> Declaration:
    """The declaration of a setting."""
    return declarations(GROUP_OF[key])[key]


def flag_of(key: str) -> str:
    """The spelling of an option of ours that the help shows."""
    return f"--ft-{key.replace('_', '-')}"


def canonical(name: str, in_yaml: bool = False) -> str | None:
    """Returns the key of a name from YAML or the environment, in any case, with `-` or `_`; None for an unknown name.

    Args:
        in_yaml: whether to accept keys that programs around the launcher read from the same file.
    """
    key = name.strip().lower().replace("-", "_")
    key = ALIASES.get(key, key)
    known = key in GROUP_OF or key in nvrx_flags.DONE_INSTEAD or (in_yaml and key in nvrx_flags.OF_OTHERS)
    if known:
        return key
    return None


def key_of(flag: str) -> str | None:
    """Returns the key of an option in any of its spellings; None for an option that is not ours.

    Raises:
        UsageError: it has the prefix of ours and does not exist.
    """
    dashed = flag.replace("_", "-")
    if dashed in _WITHOUT_PREFIX:
        return _WITHOUT_PREFIX[dashed]
    if not dashed.startswith(_OURS):
        return None
    key = canonical(dashed.removeprefix("--ft-").removeprefix("param-"))
    if key is None:
        raise unknown_option(flag, ())
    return key


def is_switch(key: str) -> bool:
    """Whether the value is true or false, and may be left out."""
    return key in nvrx_flags.SWITCHES or (key in GROUP_OF and declaration_of(key).kind is kinds.BOOLEAN)


def unknown_option(flag: str, torch_flags: Iterable[str]) -> UsageError:
    """Makes the error about an option that does not exist, with the most similar one that does."""
    dashed = flag.replace("_", "-").replace("--ft-param-", "--ft-")
    known = [*torch_flags, *_WITHOUT_PREFIX]
    if dashed.startswith(_OURS):
        known += [flag_of(key) for key in (*GROUP_OF, *ALIASES, *nvrx_flags.DONE_INSTEAD)]
    return UsageError(f"unknown option {flag}{nearest(dashed, known)}")


def looks_like(name: str, known: Iterable[str], most: int) -> list[str]:
    """Returns the names of `known` at an edit distance of at most `most` from `name`, the nearest first."""
    distances = {other: _edit_distance(name, other) for other in known if abs(len(name) - len(other)) <= most}
    return sorted((other for other, distance in distances.items() if distance <= most), key=distances.__getitem__)


def _edit_distance(name: str, known: str) -> int:
    """Returns the Levenshtein distance, computed row by row."""
    row = list(range(len(known) + 1))
    for at, letter in enumerate(name, start=1):
        before, row = row, [at]
        for place, another in enumerate(known, start=1):
            replaced = before[place - 1]
            if letter != another:
                replaced += 1
            row.append(min(before[place] + 1, row[-1] + 1, replaced))
    return row[-1]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean X?)`, or an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    if close:
        return f" (did you mean {close[0]}?)"
    return ""


def add_group(parser: ArgumentParser) -> None:
    """Adds our options to torch's parser, each once, as `--ft-key` with dest `ft_key`."""
    group = parser.add_argument_group(
        "fault tolerance",
        "Each of these can also be given as FT_<KEY> in the environment, or as a key under fault_tolerance: in the "
        "YAML that --ft-cfg-path names. `none` means no limit. --ft-KEY, --ft-param-KEY and --ft_KEY are the same; so "
        "are --restart-policy, --workers-stop-timeout, --term-timeout (--ft-preemption-grace), --fault-tol-cfg-path "
        "and --ignore-missing-fault-tol-cfg. Options of NVIDIA's launcher that have no meaning here are accepted.",
    )
    for key, of_group in GROUP_OF.items():
        declaration = declaration_of(key)
        form = declaration.kind.form
        default = default_of(of_group, key)
        text = f"{declaration.help} ({form}; default {_shown(declaration.kind, default)})".replace("%", "%%")
        if declaration.instead:
            text = SUPPRESS
        argument: dict[str, Any] = {"dest": f"ft_{key}", "metavar": form, "help": text}
        if " " in form:
            argument["metavar"] = "VALUE"
        if key in REPEATED:
            argument["action"] = "append"
        if is_switch(key):
            argument |= {"nargs": "?", "const": "true"}
        group.add_argument(flag_of(key), **argument)


def _shown(kind: kinds.Kind, default: object) -> str:
    if kind is kinds.SIGNAL and isinstance(default, int):
        return kinds.signal_name(default)
    if default is None or default in ((), {}):
        return "none"
    if isinstance(default, tuple):
        return ":".join(f"{bound:g}" for bound in default)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)
