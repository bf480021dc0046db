"""Options of NVIDIA's launcher that have no meaning here, and keys of YAML files that other programs read.

They are accepted, so that batch scripts run unchanged, with one warning that says what is done instead. Options that
have a meaning here are ordinary settings.
"""

from __future__ import annotations

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
"""Key -> what is done instead."""

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
"""Key of a YAML file -> how it is handled: programs around the launcher read these from the same mapping."""

SWITCHES = frozenset({"skip_section_response", "use_infra_group_rank", "enable_log_server"})
"""Those whose value is true or false, and may be left out; all others take a value."""


def warning(source: str, key: str) -> str:
    """The one line about an option or key that is accepted and does nothing."""
    return f"{source} is accepted and does nothing here: {DONE_INSTEAD.get(key) or OF_OTHERS[key]}"
