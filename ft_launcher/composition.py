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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as torch_launcher

from ft_launcher import console, descriptor_limit, nccl, one_node, report, several_nodes, unwatched
from ft_launcher.access import Access
from ft_launcher.agent import NodeAgent
from ft_launcher.contained import contained
from ft_launcher.cycle_files import CycleInfo
from ft_launcher.cycle_store import PortHolder, shares_store
from ft_launcher.health.memory_reclaim import GpuMemory
from ft_launcher.health.node_health import NodeHealth
from ft_launcher.injected import Injected
from ft_launcher.logs import CycleLogs, RunFolder
from ft_launcher.member_agent import MemberAgent
from ft_launcher.node_parts import NodeParts
from ft_launcher.node_rendezvous import NodeRendezvous
from ft_launcher.process_tree import become_subreaper
from ft_launcher.recorder import Recorder
from ft_launcher.rendezvous_check import is_file_store
from ft_launcher.runtime import Runtime
from ft_launcher.signals import SignalPipe, numbers_of
from ft_launcher.torch_config import Job
from ft_launcher.zygote_pool import ZygotePool
from rank_monitor.contract import env, resolver
from rank_monitor.contract.config import StopSettings
from rank_monitor.contract.errors import ConfigError, FtError
from rank_monitor.contract.exit_codes import ExitCode

logger = logging.getLogger("ft_launcher")

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torch's, before it had an option for them
_STATIC_PORT = 29500


@dataclass(frozen=True)
class Outcome:
    """What a run came to: exit code and reason; what functions returned, by global rank; what ended it, if anything."""

    code: int
    reason: str
    values: Mapping[int, Any] = field(default_factory=dict)
    error: BaseException | None = None


def run(job: Job, runtime: Runtime, zygotes: ZygotePool) -> int:
    """Runs the job on this node until its end.

    The handlers of ending signals stay in place: a late signal must not break the way out.

    Returns:
        The launcher's exit code.
    """
    become_subreaper()
    descriptor_limit.raise_soft()
    console.install()
    signals = SignalPipe({*ending_signals(job), signal.SIGUSR1, signal.SIGUSR2})
    try:
        with resolver.usual():
            return exit_code_of(conduct(job, runtime, zygotes, signals), job.settings.stop)
    except FtError as error:
        report.show_lines(f"ft_launcher: {error}")
        write_reply(error)
        return int(ExitCode.BAD_CONFIG if isinstance(error, ConfigError) else ExitCode.LAUNCHER_ERROR)


def exit_code_of(outcome: Outcome, settings: StopSettings) -> int:
    """What the process exits with. Journal and nodes keep to the codes of the table, whose meaning is fixed."""
    return settings.preempted_exit_code if outcome.code == ExitCode.PREEMPTED else outcome.code


def ending_signals(job: Job) -> tuple[int, ...]:
    """The signals to the launcher that end the job."""
    return numbers_of(getattr(job.launch_config, "signals_to_handle", _SIGNALS))


def conduct(job: Job, runtime: Runtime, zygotes: ZygotePool, signals: SignalPipe, within: bool = False) -> Outcome:
    """Runs the job and writes its story.

    Args:
        within: inside a user's program: its children are none of ours, and the caller shows what ended the run.

    Raises:
        FtError: it cannot begin.
    """
    _set_up_logging(job)
    run_folder = RunFolder(job.log_dir, job.launch_config.run_id, Access(job.settings.record.log_group_access))
    try:
        recorder = Recorder(run_folder, job.settings.record.journal_dir)
        outcome = _run_recorded(job, runtime, zygotes, signals, run_folder, recorder, within)
        recorder.job_ended(outcome.code, outcome.reason)
    finally:
        run_folder.close()
    return outcome


def _run_recorded(
    job: Job,
    runtime: Runtime,
    zygotes: ZygotePool,
    signals: SignalPipe,
    run_folder: RunFolder,
    recorder: Recorder,
    within: bool,
) -> Outcome:
    config = job.launch_config
    nccl_bound = nccl.detection(os.environ | nccl.variables(job.settings.nccl, os.environ), config.max_restarts)
    recorder.job_started(config.run_id, job.command, config.max_restarts, config.nproc_per_node)
    agents: list[NodeAgent] = []

    def launch() -> Mapping[int, Any]:
        ports = _choose_rendezvous(job)
        together = bool(job.settings.record.per_cycle_applog_prefix)
        if job.logs_specs_name is None or together:
            redirects = Std.ALL if together else job.redirects
            config.logs_specs = CycleLogs(run_folder, runtime.folder, redirects, job.tee, job.local_ranks_filter)
        folders = [str(runtime.folder), *filter(None, [job.log_dir])]
        parts = NodeParts(
            settings=job.settings,
            runtime=runtime,
            recorder=recorder,
            signals=signals,
            ports=ports,
            zygotes=zygotes,
            health=NodeHealth(job.settings.health, folders, runtime.tag),
            memory=GpuMemory(job.settings.stop, runtime.tag),
            injected=Injected(job.settings.start.inject, runtime.folder / "m0", job.no_python),
            cycle_info=CycleInfo(job.settings.record, os.environ),
            limits_given=unwatched.limits_given(job.settings.monitor, job.sources),
            nccl_bound=nccl_bound,
            several_nodes=config.rdzv_backend != one_node.BACKEND,
            named_signals=job.named_signals,
            adopt_orphans=not within,
            is_script=job.is_script,
        )
        with _our_agent(parts, agents):
            values: Mapping[int, Any] = torch_launcher.launch_agent(config, job.entrypoint, list(job.args))
            return values

    def summary(error: ChildFailedError) -> str:
        hidden, text = agents[0].hidden_ranks if agents else (), f"{error.name} FAILED"
        with contained("the summary of the ranks that failed cannot be shown"):
            text = report.failed_ranks(error.name, error.failures, recorder.shown, hidden)
        return text

    outcome = _outcome(launch, (lambda text: None) if within else report.show_lines, summary)
    if outcome.error is not None and not within:
        write_reply(outcome.error)
    if agents and agents[0].exit_code is not None:
        outcome = replace(outcome, code=agents[0].exit_code, reason=agents[0].reason or outcome.reason)
    return outcome


@contextmanager
def _our_agent(parts: NodeParts, made: list[NodeAgent]) -> Iterator[None]:
    """While this lasts, torch's `launch_agent` makes agents of ours; `made` collects them."""

    def make(*args: Any, **kwargs: Any) -> NodeAgent:
        kind = MemberAgent if isinstance(kwargs["spec"].rdzv_handler, NodeRendezvous) else NodeAgent
        made.append(kind(*args, parts=parts, **kwargs))
        return made[-1]

    before = torch_launcher.LocalElasticAgent
    torch_launcher.LocalElasticAgent = make
    try:
        yield
    finally:
        torch_launcher.LocalElasticAgent = before


def write_reply(error: BaseException) -> None:
    """Writes the file that TORCHELASTIC_ERROR_FILE names for the launcher, as torchrun's `@record` does.

    Schedulers read it: the error file of the rank that failed first, with its exit code, or what ended the launcher.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        _reply(get_error_handler(), error)
    except Exception as problem:  # the exit code stays what it is
        logger.warning("the reply file %s cannot be written: %s: %s", path, type(problem).__name__, problem)


def _reply(handler: Any, error: BaseException) -> None:
    try:
        raise error
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        if Path(failure.error_file).is_file():
            handler.dump_error_file(failure.error_file, failure.exitcode)
    except Exception:
        handler.record_exception(error)


def _outcome(
    launch: Callable[[], Mapping[int, Any]], show: Callable[[str], None], summary: Callable[[ChildFailedError], str]
) -> Outcome:
    """What the run came to, with an exit code for where the agent has none of its own."""
    try:
        values = launch()
    except ChildFailedError as error:
        show(summary(error))
        return Outcome(int(ExitCode.RANKS_FAILED), "ranks failed", error=error)
    except SignalException as error:
        return Outcome(int(ExitCode.PREEMPTED), str(error), error=error)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = f"the rendezvous failed: {_one_line(error)}"
        show(f"ft_launcher: {reason}. Check --rdzv-endpoint or --master-addr, and the other nodes")
        return Outcome(int(ExitCode.RENDEZVOUS_FAILED), reason, error=error)
    except ConfigError as error:
        show(f"ft_launcher: {error}")
        return Outcome(int(ExitCode.BAD_CONFIG), str(error), error=error)
    except FtError as error:
        show(f"ft_launcher: {error}")
        return Outcome(int(ExitCode.LAUNCHER_ERROR), str(error), error=error)
    except OSError as error:
        reason = f"the system refused: {error}"
        show(f"ft_launcher: {reason}")
        return Outcome(int(ExitCode.LAUNCHER_ERROR), reason, error=error)
    except Exception as error:
        reason = f"{type(error).__name__}: {_one_line(error)}"
        show(f"ft_launcher: error of the launcher itself: {reason}")
        show(traceback.format_exc())
        return Outcome(int(ExitCode.LAUNCHER_ERROR), reason, error=error)
    return Outcome(int(ExitCode.OK), "all ranks succeeded", values)


def _choose_rendezvous(job: Job) -> PortHolder:
    """Puts a rendezvous of ours in the place of torch's, where one fits; returns who holds the ranks' port.

    A job of one node needs none. One of several runs ours over torch's store; a backend that torch does not ship runs
    as it is.

    Raises:
        RendezvousConnectionError: the endpoint's host does not resolve.
    """
    config, port_range = job.launch_config, job.settings.start.port_range
    static = config.rdzv_backend == "static"
    master, port = "127.0.0.1", None
    if config.rdzv_endpoint and config.rdzv_backend in ("c10d", "static") and not is_file_store(config.rdzv_configs):
        host, given = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_STATIC_PORT)
        _must_resolve(host, config.rdzv_endpoint)
        master, port = (host, given) if static else (master, None)
    alone = config.max_nodes == 1 and not job.settings.members.spares
    if alone and config.rdzv_backend in ("c10d", "static"):
        if config.local_addr and not static:
            _must_resolve(config.local_addr, config.local_addr)
            master = config.local_addr
        one_node.register()
        config.rdzv_configs = config.rdzv_configs | {"ft_host": master, "ft_shares": static or shares_store(os.environ)}
        config.rdzv_backend = one_node.BACKEND
        return PortHolder(master, port, port_range)
    ports = PortHolder(config.local_addr or socket.gethostname(), None, port_range)
    if config.rdzv_backend in several_nodes.OURS:
        several_nodes.use(config, job.settings, ports)
    return ports


def _must_resolve(host: str, endpoint: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise RendezvousConnectionError(f"the host of {endpoint!r} does not resolve ({error})") from None


def _set_up_logging(job: Job) -> None:
    """Our own log lines go to stderr, and to a file where one is asked for."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if logfile := job.settings.record.nvrx_logfile:
        try:
            if not Path(logfile).exists():
                Access(job.settings.record.log_group_access).create(Path(logfile))
            handlers.append(logging.FileHandler(logfile))
        except OSError as error:
            source = job.sources.get("nvrx_logfile", "settings")
            raise ConfigError("nvrx_logfile", logfile, source, str(error.strerror), "Name a file to write") from None
    for handler in handlers:
        handler.setFormatter(report.LineFormatter("%(asctime)s ft_launcher %(levelname)s: %(message)s"))
    logger.handlers = handlers
    logger.propagate = False
    logger.setLevel("DEBUG" if os.environ.get(env.DEBUG) else job.settings.monitor.log_level)
    for warning in job.warnings:
        logger.warning(warning)


def _one_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
