"""Declares our options: which exist, how they are spelled, and what their help says.

Command line, YAML, environment and `LaunchConfig` look up their names here, so that a setting has the same name and
help everywhere. This file knows neither torch nor where a command line ends. Values stay text here;
`rank_monitor.contract.settings.declaration` reads them.

Some names are accepted and do nothing: options of NVIDIA's launcher that have no meaning here, and keys of YAML files
that other programs read. So batch scripts run unchanged. Each of these gives one warning that says what is done
instead.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterable
from typing import Any

from rank_monitor.contract.errors import ConfigError, nearest
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
"""Other name of a setting -> its key. Batch scripts and configurations for NVIDIA's launcher and for Flyte have these
names."""

REPEATED = frozenset({"inject"})
"""Settings of which every option on the command line adds one. Of all other settings the last option holds."""

# Batch scripts for NVIDIA's launcher spell these options without our prefix.
_WITHOUT_PREFIX = {
    "--fault-tol-cfg-path": "cfg_path",
    "--ignore-missing-fault-tol-cfg": "ignore_missing_cfg",
    "--restart-policy": "restart_policy",
    "--workers-stop-timeout": "workers_stop_timeout",
    "--term-timeout": "preemption_grace",
}
_OURS = ("--ft-", "--fault-tol")
"""Beginnings of options that are ours. With one of them, an unknown option is an error of ours and not of torch's
parser."""


_NO_LOG_SERVER = "there is no log server: each node writes its own files, see --log-dir, --tee and --redirects"
_NO_SERVICE = "faults are attributed by the launcher itself, without a service or a language model"

DONE_INSTEAD: dict[str, str] = {
    "skip_section_response": "a rank never waits for an answer of its monitor",
    "rdzv_impl": "--rdzv-backend chooses the rendezvous, and each backend has one implementation",
    "use_infra_group_rank": "the rendezvous gives nodes their ranks; the static one takes --node-rank",
    "restart_check_interval": "the launcher waits for events, and polls for nothing at a restart",
    **dict.fromkeys(
        (
            "enable_log_server",
            "log_server_port",
            "log_aggregator_count",
            "log_leaf_max_queue_chunks",
            "log_server_log_prefix",
            "log_server_graceful_shutdown_timeout",
        ),
        _NO_LOG_SERVER,
    ),
    **dict.fromkeys(
        (
            "attribution_endpoint",
            "attribution_llm_api_key_file",
            "attribution_llm_base_url",
            "attribution_llm_model",
            "attribution_log_level",
            "attribution_export_url",
            "attribution_startup_timeout",
            "attribution_analysis_backend",
            "attribution_stop_action",
            "attribution_compute_timeout",
            "attrsvc_host",
            "attrsvc_port",
        ),
        _NO_SERVICE,
    ),
}
"""Key of an option that is accepted and does nothing -> what is done instead, for the warning."""

_SIMULATED = "the training reads it, as before; --ft-inject does the same from outside"

OF_OTHERS: dict[str, str] = {
    # `exp_manager.fault_tolerance` of NeMo, which its experiment manager and its writer of batch scripts read.
    "calculate_timeouts": "the training reads it and gives it to its callback, which learns the limits",
    "max_rank_restarts": "the batch script passes it on; --max-restarts counts",
    "max_subsequent_job_failures": "the batch script reads it; MAX_FAILURES of scripts/slurm/ is the same",
    "additional_ft_launcher_args": "the batch script passes it on; what is on the command line counts",
    "simulated_fault": _SIMULATED,
    # `FaultToleranceConfig` of Megatron Bridge.
    "enable_ft_package": "the training reads it, and then calls the client",
    "calc_ft_timeouts": "the training reads it, and then has the client learn the limits",
    **dict.fromkeys(
        ("simulate_fault", "simulated_fault_type", "simulated_fault_rank", "simulated_fault_base_delay"), _SIMULATED
    ),
    # `FaultTolerance` of NeMo-Run and the plugins that fill it in.
    "max_restarts": "--max-restarts of the command line counts",
    "num_in_job_restarts": "--max-restarts of the command line counts",
    "num_job_retries_on_failure": "the batch script reads it; MAX_FAILURES of scripts/slurm/ is one more",
    "finished_flag_file": "the training writes the file that FAULT_TOL_FINISHED_FLAG_FILE names",
    "job_results_file": "the batch script writes it",
    **dict.fromkeys(("rdzv_backend", "rdzv_port", "rdzv_id"), "the option of that name on the command line counts"),
}
"""Key of a YAML file that other programs read -> how it is handled. These programs read it from the same mapping as the
launcher."""

SWITCHES = frozenset({"skip_section_response", "use_infra_group_rank", "enable_log_server"})
"""Options without an effect whose value is true or false and may be left out. All others of them take a value."""


class UsageError(ConfigError):
    """The command line as a whole is wrong, not one value of it.

    Args:
        problem: what is wrong.
        hint: what to do.
    """

    def __init__(self, problem: str, hint: str = "See ft_launcher --help") -> None:
        super().__init__("command line", "", "command line", problem, hint)
        self.args = (f"{problem}. {hint}",)


def declaration_of(key: str) -> Declaration:
    """Returns the declaration of a setting."""
    return declarations(GROUP_OF[key])[key]


def flag_of(key: str) -> str:
    """Returns the spelling of our option that the help shows: `--ft-restart-policy`."""
    return f"--ft-{key.replace('_', '-')}"


def canonical(name: str, in_yaml: bool = False) -> str | None:
    """Returns the key of a name from YAML or the environment: in any case, with `-` or `_`. None: there is no such
    name.

    Args:
        in_yaml: whether to accept keys that programs around the launcher read from the same file.
    """
    key = name.strip().lower().replace("-", "_")
    key = ALIASES.get(key, key)
    known = key in GROUP_OF or key in DONE_INSTEAD or (in_yaml and key in OF_OTHERS)
    if known:
        return key
    return None


def key_of(flag: str) -> str | None:
    """Returns the key of an option in any of its spellings. None: the option is not ours.

    Example: `key_of("--ft-param-restart_policy")` and `key_of("--restart-policy")` are both "restart_policy".

    Raises:
        UsageError: the option has our prefix and does not exist.
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
    """Whether the value of an option is true or false, and may be left out."""
    return key in SWITCHES or (key in GROUP_OF and declaration_of(key).kind is kinds.BOOLEAN)


def unknown_option(flag: str, torch_flags: Iterable[str]) -> UsageError:
    """Returns the error about an option that does not exist, with the most similar option that does."""
    dashed = flag.replace("_", "-").replace("--ft-param-", "--ft-")
    known = [*torch_flags, *_WITHOUT_PREFIX]
    if dashed.startswith(_OURS):
        known += [flag_of(key) for key in (*GROUP_OF, *ALIASES, *DONE_INSTEAD)]
    return UsageError(f"unknown option {flag}{nearest(dashed, known)}")


def about_accepted(source: str, key: str) -> str:
    """Returns the warning about an option or key that is accepted and does nothing."""
    return f"{source} is accepted and does nothing here: {DONE_INSTEAD.get(key) or OF_OTHERS[key]}"


def add_group(parser: ArgumentParser) -> None:
    """Adds our options to torch's parser, each once: as `--ft-key`, with `ft_key` as its name in the namespace."""
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
    """Returns a default as the help shows it."""
    if kind is kinds.SIGNAL and isinstance(default, int):
        return kinds.signal_name(default)
    if default is None or default in ((), {}):
        return "none"
    if isinstance(default, tuple) and kind is kinds.PRELOAD:
        return ",".join(default)
    if isinstance(default, tuple):
        return ":".join(f"{bound:g}" for bound in default)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)
