"""Options of NVIDIA's launcher that have no meaning here: taken, so that batch scripts run unchanged, with one warning
that says what is done instead. Those with a meaning here are settings like any other.
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
        ),
        _NO_SERVICE,
    ),
}
"""Key -> what is done instead."""

SWITCHES = frozenset({"skip_section_response", "use_infra_group_rank", "enable_log_server"})
"""Those whose value is true or false, and may be left out; all others take a value."""


def warning(source: str, key: str) -> str:
    """The one line about an option that was taken and does nothing."""
    return f"{source} is accepted and does nothing here: {DONE_INSTEAD[key]}"
