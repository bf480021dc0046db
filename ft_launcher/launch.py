"""Puts the launcher together, runs it, and turns its outcome into an exit code. The composition root.

torch's own `launch_agent` builds the rendezvous and runs the agent; the name of the agent class in its module is
rebound to ours meanwhile, so that nothing of it is copied.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as torch_launcher

from ft_launcher import one_node, report
from ft_launcher.agent import NodeAgent, NodeParts
from ft_launcher.cycle_store import PortHolder
from ft_launcher.logs import CycleLogs, RunFolder
from ft_launcher.process_tree import become_subreaper
from ft_launcher.recorder import Recorder
from ft_launcher.runtime import Runtime
from ft_launcher.signals import SignalPipe, numbers_of
from ft_launcher.torch_config import Job
from ft_launcher.zygote_pool import ZygotePool
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError, FtError
from rank_monitor.contract.exit_codes import ExitCode

logger = logging.getLogger("ft_launcher")

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torch's, before it had an option for them
_STATIC_PORT = 29500
_QUICK_RESOLVER = "timeout:1 attempts:1"
"""torch's stores look up the name of each peer: 5 s where no resolver answers. One node needs no names."""


def run(job: Job, runtime: Runtime, zygotes: ZygotePool) -> int:
    """Runs the job on this node until its end.

    The handlers of ending signals stay in place: a late signal must not break the way out.

    Returns:
        The launcher's exit code.
    """
    become_subreaper()
    if job.launch_config.max_nodes == 1:
        os.environ.setdefault("RES_OPTIONS", _QUICK_RESOLVER)
    signals = SignalPipe(
        {*numbers_of(getattr(job.launch_config, "signals_to_handle", _SIGNALS)), signal.SIGUSR1, signal.SIGUSR2}
    )
    try:
        _set_up_logging(job)
        run_folder = RunFolder(job.log_dir, job.launch_config.run_id)
        recorder = Recorder(run_folder, job.settings.record.journal_dir)
        code, reason = _run_recorded(job, runtime, zygotes, signals, run_folder, recorder)
        recorder.job_ended(code, reason)
        return code
    except FtError as error:
        report.show(f"ft_launcher: {error}")
        return int(ExitCode.BAD_CONFIG if isinstance(error, ConfigError) else ExitCode.LAUNCHER_ERROR)


def _run_recorded(
    job: Job, runtime: Runtime, zygotes: ZygotePool, signals: SignalPipe, run_folder: RunFolder, recorder: Recorder
) -> tuple[int, str]:
    """Runs the job; returns exit code and reason."""
    config = job.launch_config
    recorder.job_started(config.run_id, [job.entrypoint, *job.args], config.max_restarts, config.nproc_per_node)
    agents: list[NodeAgent] = []

    def launch() -> None:
        host, port = _simplify_one_node(config)
        if job.logs_specs_name is None:
            config.logs_specs = CycleLogs(run_folder, runtime.folder, job.redirects, job.tee, job.local_ranks_filter)
        parts = NodeParts(
            settings=job.settings,
            runtime=runtime,
            recorder=recorder,
            signals=signals,
            ports=PortHolder(host, port, job.settings.start.port_range),
            zygotes=zygotes,
            several_nodes=config.max_nodes > 1,
        )
        with _our_agent(parts, agents):
            torch_launcher.launch_agent(config, job.entrypoint, list(job.args))

    code, reason = _outcome(launch)
    if agents and agents[0].exit_code is not None:
        code = agents[0].exit_code
    return code, reason


@contextmanager
def _our_agent(parts: NodeParts, made: list[NodeAgent]) -> Iterator[None]:
    """While this lasts, torch's `launch_agent` makes agents of ours; `made` collects them."""

    def make(*args: Any, **kwargs: Any) -> NodeAgent:
        made.append(NodeAgent(*args, parts=parts, **kwargs))
        return made[-1]

    before = torch_launcher.LocalElasticAgent
    torch_launcher.LocalElasticAgent = make
    try:
        yield
    finally:
        torch_launcher.LocalElasticAgent = before


def _outcome(launch: Callable[[], None]) -> tuple[int, str]:
    """What the run came to, as an exit code where the agent has none of its own, and a reason."""
    try:
        launch()
    except ChildFailedError as error:
        report.show(str(error))
        return int(ExitCode.RANKS_FAILED), "ranks failed"
    except SignalException as error:
        return int(ExitCode.PREEMPTED), str(error)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = f"the rendezvous failed: {_one_line(error)}"
        report.show(f"ft_launcher: {reason}. Check --rdzv-endpoint or --master-addr, and the other nodes")
        return int(ExitCode.RENDEZVOUS_FAILED), reason
    except ConfigError as error:
        report.show(f"ft_launcher: {error}")
        return int(ExitCode.BAD_CONFIG), str(error)
    except OSError as error:
        reason = f"the system refused: {error}"
        report.show(f"ft_launcher: {reason}")
        return int(ExitCode.LAUNCHER_ERROR), reason
    except Exception as error:
        reason = f"{type(error).__name__}: {_one_line(error)}"
        report.show(f"ft_launcher: error of the launcher itself: {reason}")
        report.show(traceback.format_exc())
        return int(ExitCode.LAUNCHER_ERROR), reason
    return int(ExitCode.OK), "all ranks succeeded"


def _simplify_one_node(config: Any) -> tuple[str, int | None]:
    """A job of one node needs no rendezvous: changes the backend to ours; returns host and port of the ranks' store.

    Raises:
        RendezvousConnectionError: the endpoint's host does not resolve.
    """
    if config.rdzv_endpoint and config.rdzv_backend in ("c10d", "static"):
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_STATIC_PORT)
        _must_resolve(host, config.rdzv_endpoint)
    if config.max_nodes != 1 or config.rdzv_backend not in ("c10d", "static"):
        return config.local_addr or socket.gethostname(), None
    one_node.register()
    static = config.rdzv_backend == "static"
    master = host if static else "127.0.0.1"
    config.rdzv_configs = config.rdzv_configs | {"ft_host": master}
    config.rdzv_backend = one_node.BACKEND
    return master, port if static else None


def _must_resolve(host: str, endpoint: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise RendezvousConnectionError(f"the host of endpoint {endpoint!r} does not resolve ({error})") from None


def _set_up_logging(job: Job) -> None:
    """Our own log lines go to stderr, and to a file where one is asked for."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if logfile := job.settings.record.nvrx_logfile:
        try:
            handlers.append(logging.FileHandler(logfile))
        except OSError as error:
            source = job.sources.get("nvrx_logfile", "settings")
            raise ConfigError("nvrx_logfile", logfile, source, str(error.strerror), "Name a file to write") from None
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s ft_launcher %(levelname)s: %(message)s"))
    logger.handlers = handlers
    logger.propagate = False
    logger.setLevel("DEBUG" if os.environ.get(env.DEBUG) else job.settings.monitor.log_level)
    for warning in job.warnings:
        logger.warning(warning)


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
