"""Megatron Bridge's options: their defaults, and what each may be."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from ft_client.inprocess.restart_config import InProcessRestartConfig, logfile_name


def test_documented_defaults() -> None:
    config = InProcessRestartConfig()
    assert asdict(config) == {
        "enabled": False,
        "active_world_size": None,
        "granularity": "node",
        "max_iterations": None,
        "soft_timeout": 60,
        "hard_timeout": 90,
        "heartbeat_interval": 30,
        "heartbeat_timeout": 60,
        "monitor_thread_interval": 1,
        "monitor_process_interval": 1,
        "progress_watchdog_interval": 1,
        "barrier_timeout": 120,
        "completion_timeout": 120,
        "last_call_wait": 1,
        "termination_grace_time": 1,
        "empty_cuda_cache": True,
        "max_rank_faults": None,
        "monitor_process_logdir": None,
    }
    timeouts = config.timeouts()
    assert timeouts.heartbeat_timeout.total_seconds() == 60 and timeouts.termination_grace_time.total_seconds() == 1


def test_it_may_be_changed_before_it_is_used() -> None:
    config = InProcessRestartConfig()
    config.soft_timeout = 0.5
    with pytest.raises(ValueError, match=r"monitor_process_interval=1 s must be below soft_timeout=0.5 s"):
        config.timeouts()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"enabled": "yes"}, TypeError, "enabled='yes'"),
        ({"empty_cuda_cache": None}, TypeError, "empty_cuda_cache=None"),
        ({"granularity": "rack"}, ValueError, "granularity='rack' is neither 'node' nor 'rank'"),
        ({"granularity": []}, ValueError, "granularity"),
        ({"active_world_size": 0}, ValueError, "active_world_size=0 is below 1"),
        ({"active_world_size": 4.0}, TypeError, "active_world_size=4.0"),
        ({"max_iterations": 0}, ValueError, "max_iterations=0 is below 1"),
        ({"max_rank_faults": -1}, ValueError, "max_rank_faults=-1 is below 0"),
        ({"max_rank_faults": True}, TypeError, "max_rank_faults=True"),
        ({"monitor_process_logdir": 3}, TypeError, "monitor_process_logdir=3"),
        ({"soft_timeout": "60"}, TypeError, "soft_timeout='60' is not a number of seconds"),
        ({"soft_timeout": None}, TypeError, "soft_timeout=None"),
        ({"barrier_timeout": float("inf")}, ValueError, "barrier_timeout=inf is not finite"),
        ({"last_call_wait": -1}, ValueError, "last_call_wait=-1 s is below zero"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        InProcessRestartConfig(**given).timeouts()


def test_the_name_of_the_log() -> None:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    assert logfile_name(slurm, "node-9") == "monitor_77_node-9_3_1.log"
    assert logfile_name({}, "node-9") == "monitor_none_node-9_none_none.log"
