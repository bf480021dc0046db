"""Describes what the launcher would start on this node: command, environment, start and limits of each rank. Pure.

`cli.py` prints it for `--ft-dry-run`. Nothing is started, and no other node is asked, so values that the
rendezvous decides are shown as such.

The variables and the command come from the functions that also start ranks (`node/ranks/environment.py`,
`settings/rank_program.py`): a dry run that told its own story would be wrong sooner or later. Only torchrun's variables
are listed here, since `torch_environment` needs numbers that are not known yet.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from ft_launcher.node.ranks.environment import cycle_environment, rank_environment
from ft_launcher.settings import rank_program
from ft_launcher.settings.job_settings import Job
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import MonitorSettings

_AT_THE_START = "(known at the start)"
"""In the place of values that the rendezvous decides: a dry run takes part in none."""


def describe(job: Job, environ: Mapping[str, str]) -> str:
    """Returns lines about the job, then about each rank of this node: command, start, variables, limits.

    Args:
        job: as the command line, the configuration file and the environment have set it.
        environ: the launcher's own environment, which the ranks inherit.
    """
    config = job.launch_config
    if config.min_nodes == config.max_nodes:
        nodes = f"{config.min_nodes}"
    else:
        nodes = f"{config.min_nodes}:{config.max_nodes}"
    lines = [
        f"job: {job.script}",
        f"nodes: {nodes}, ranks on this node: {config.nproc_per_node}, restarts: {config.max_restarts}",
        f"rendezvous: {config.rdzv_backend} at {config.rdzv_endpoint or 'the default endpoint'}, id {config.run_id}",
        f"logs: {job.log_dir or 'the console'}",
    ]
    for local_rank in range(config.nproc_per_node):
        if job.is_script:
            command = [job.entrypoint, *rank_program.through_bootstrap(job.args)]
        else:
            command = [job.entrypoint, *job.args]
        lines += ["", f"local rank {local_rank}", f"  command: {shlex.join(command)}"]
        lines.append(f"  start: {start_of(job)}")
        lines += [f"  env {name}={value}" for name, value in _environment(job, local_rank, environ)]
        lines += [f"  limit {name}: {value}" for name, value in _limits(job.settings.monitor)]
    return "\n".join(lines)


def _environment(job: Job, local_rank: int, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the variables that the launcher sets for a rank, with their values as far as they are known.

    On one node the numbers of ranks are known. Among several nodes they depend on who arrives.
    """
    config, ranks = job.launch_config, job.launch_config.nproc_per_node
    yield "LOCAL_RANK", str(local_rank)
    yield "LOCAL_WORLD_SIZE", str(ranks)
    numbers = {"RANK": _AT_THE_START, "WORLD_SIZE": _AT_THE_START, "GROUP_RANK": _AT_THE_START}
    if config.max_nodes == 1:
        numbers = {"RANK": str(local_rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    yield from numbers.items()
    yield "MASTER_ADDR", _AT_THE_START
    yield "MASTER_PORT", _AT_THE_START
    yield "TORCHELASTIC_RUN_ID", config.run_id
    yield "TORCHELASTIC_RESTART_COUNT", "0"
    yield "TORCHELASTIC_MAX_RESTARTS", str(config.max_restarts)
    if "OMP_NUM_THREADS" in environ:
        yield "OMP_NUM_THREADS", environ["OMP_NUM_THREADS"]
    yield from cycle_environment(job.settings, environ, job.no_python, {}, None).items()
    yield env.MEMORY_FILES, _AT_THE_START
    folder = Path(_AT_THE_START)
    signal_number = job.settings.monitor.stack_signal
    yield from rank_environment(_AT_THE_START, 0, folder, folder, signal_number).items()


def _limits(monitor: MonitorSettings) -> Iterator[tuple[str, str]]:
    """Yields each limit of a rank in words, with its value: the time from what to what it bounds."""
    yield "to the first sign of life", _seconds(monitor.initial_rank_heartbeat_timeout)
    yield "between signs of life", _seconds(monitor.rank_heartbeat_timeout)
    for name, limit in monitor.rank_section_timeouts.items():
        yield f"section {name}", _seconds(limit)
    yield "outside sections", _seconds(monitor.rank_out_of_section_timeout)
    yield "to the connection", _seconds(monitor.connect_timeout)
    yield "from one printed step to the next", _seconds(monitor.watch_log_timeout)
    yield "a hang", _seconds(monitor.hang_timeout)
    yield "stall warning", _seconds(monitor.stall_warning)
    yield "after shutdown_workload_monitoring", _seconds(monitor.teardown_timeout)


def _seconds(limit: float | None) -> str:
    """Returns a limit in words; None is a limit that is off."""
    if limit is None:
        return "none"
    return f"{limit:g} s"


def start_of(job: Job) -> str:
    """Returns how ranks would be started, in words. Whether this machine allows forks is known only at the start.

    `ft_launcher validate` says more: why a script's ranks cannot be forks.
    """
    if job.no_python or job.settings.start.warm_start == "off":
        return "exec"
    return "fork of one import of torch, else exec with the reason in the log"
