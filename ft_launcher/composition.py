"""Makes the parts of the launcher, runs them, and turns the outcome into an exit code: the composition root.

`cli.py` calls `run`, `python_api.py` calls `conduct`. Here, and only here, parts of different wings meet: the agent
gets its rendezvous, its recorder and the tools that watch it, and knows none of the files that make them.
`agent/torch_launch.py` then runs the agent as torch's own launcher would.

The order of a run: logging, the folder of logs, recorder and time ledger; then whatever listens to the journal (traces,
status); then rendezvous, parts and agent; at the end the event `job_end`, and all that was opened is closed in the
opposite order.

Threads: everything here runs in the main thread. In `launch()` of a program it may be another one, in which Python
allows no handlers of signals. `EndLimit` and the writers of files have threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, get_error_handler
from torch.distributed.elastic.rendezvous.api import RendezvousError

from ft_launcher import __version__
from ft_launcher.agent.cycle.fault_injection import Injected
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.hang_warnings import limits_set
from ft_launcher.agent.node_agent import NodeAgent
from ft_launcher.agent.parts import NodeParts
from ft_launcher.agent.ranks import Ranks
from ft_launcher.agent.times import NodeTimes
from ft_launcher.agent.torch_launch import agent_arguments, run_agent, worker_spec
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.job_memory import begin_copies, end_time, flush, open_memory
from ft_launcher.node.health.memory_reclaim import MemoryReclaim
from ft_launcher.node.health.node_health import NodeHealth
from ft_launcher.node.memory_files.job_folder import JobFolder
from ft_launcher.node.processes import descriptor_limit
from ft_launcher.node.processes.end_limit import EndLimit
from ft_launcher.node.processes.process_tree import become_subreaper
from ft_launcher.node.processes.shared_memory_cleanup import SharedMemoryCleanup
from ft_launcher.node.processes.signals import SignalPipe, time_to_end, to_handle
from ft_launcher.node.ranks import nccl
from ft_launcher.node.ranks.runtime import Runtime
from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.record.console import console, console_text
from ft_launcher.record.journal.access import Access
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.journal.file_thread import FileHandler, FileThread
from ft_launcher.record.logs.cycle_files import CycleInfo
from ft_launcher.record.logs.logs import CycleLogs, RunFolder
from ft_launcher.record.recorder import Recorder
from ft_launcher.rendezvous_choice import choose_rendezvous
from ft_launcher.settings.job_settings import Job, numbers_of
from ft_launcher.settings.sources import keys_set
from ft_launcher.tools.status.asking import Asking
from ft_launcher.tools.status.job_nodes import JobNodes, NodeAnswers
from ft_launcher.tools.status.listening import answering, tracing
from ft_launcher.tools.status.node_status import NodeStatus
from ft_launcher.tools.status.status_feed import StatusFeed
from rank_monitor.contract import env
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.errors import ConfigError, FtError, one_line, why_refused
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode, died_of
from rank_monitor.contract.processes import peer_names, resolver
from rank_monitor.contract.settings.config import Settings
from rank_monitor.contract.settings.kinds import AUTO
from rank_monitor.contract.wire.own_file import open_own

logger = logging.getLogger("ft_launcher")

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torch's signals to handle, from before it had an option for them."""
_LAST_FILES_S = 1.0
"""Seconds at the end for lines of the log file. Journal and logs have been closed by then."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        code: the exit code.
        reason: why the run ended.
        values: global rank -> what the function returned, for a function.
        error: what ended the run; None: all ranks succeeded.
    """

    code: int
    reason: str
    values: Mapping[int, Any] = field(default_factory=dict)
    error: BaseException | None = None


def run(job: Job, runtime: Runtime, zygotes: ZygotePool) -> int:
    """Runs the job on this node until its end, as the program of this process. Returns the launcher's exit code.

    The handlers of ending signals stay in place after the end: a late signal must not break the way out.
    """
    # Before there are threads that start ranks: orphans become children of this process, and ranks get the user's limit
    # of descriptors and not the launcher's.
    become_subreaper()
    descriptor_limit.raise_soft()
    console.install()
    signals = SignalPipe(to_handle({*ending_signals(job), signal.SIGUSR1, signal.SIGUSR2}, job.named_signals))
    stop = job.settings.stop
    EndLimit(
        signals,
        limit_s=lambda arrived: min(stop.preemption_grace, time_to_end(arrived, stop.workers_stop_timeout)),
        leave=lambda number: _leave(number, runtime),
    )
    try:
        with resolver.usual():
            code = conduct(job, runtime, zygotes, signals).code
    except FtError as error:
        console_text.show_lines(console_line(str(error), time.time()))
        write_reply(error)
        return error.exit_code
    # The user can choose the exit code of a preemption. Journal and other nodes use the fixed codes of
    # docs/exit_codes.md.
    if code == ExitCode.PREEMPTED:
        return job.settings.stop.preempted_exit_code
    return code


def _leave(number: int, runtime: Runtime) -> NoReturn:
    """Ends this process at once, since its main thread stands still after an ending signal. The template ends the
    ranks.

    Called by `EndLimit`, in its thread.

    Args:
        number: the signal.
    """
    code = int(ExitCode.PREEMPTED_KILLED)
    if number == signal.SIGINT:
        code = INTERRUPTED
    console_text.say(
        f"got {signal.Signals(number).name}, and the launcher stands still, as in a call on a file system that does "
        f"not answer: it leaves, and its ranks are killed; exit code {code}"
    )
    console.drain()
    runtime.template.abandon()
    os._exit(code)


def ending_signals(job: Job) -> tuple[int, ...]:
    """Returns the numbers of the signals to the launcher that end the job."""
    return numbers_of(getattr(job.launch_config, "signals_to_handle", _SIGNALS))


def conduct(job: Job, runtime: Runtime, zygotes: ZygotePool, signals: SignalPipe, within: bool = False) -> Outcome:
    """Runs the job and records it. Blocks until its end.

    Args:
        within: whether this is inside a user's program. Its children are then not the launcher's, and the caller
            reports what ended the run.

    Raises:
        FtError: the job cannot begin.
    """
    files = FileThread()
    _set_up_logging(job, files)
    for number in signals.were_ignored:
        name = signal.Signals(number).name
        logger.warning("%s was ignored when the launcher started. It ends the job all the same", name)
    if runtime.refused:
        logger.warning("temporary files are in %s (%s)", runtime.folder.parent, "; ".join(runtime.refused))
    access = Access(job.settings.record.log_group_access)
    run_folder = RunFolder(job.log_dir, job.folder_name, access, files)
    try:
        recorder = Recorder(run_folder, job.settings.record)
        times = NodeTimes(recorder)
        settings, journal = job.settings, recorder.journal
        # Whatever listens to the journal is closed after `job_ended`, so that traces and followers of the status see
        # the end.
        with contextlib.ExitStack() as listeners:
            if settings.record.otel_traces:
                listeners.enter_context(tracing(journal, __version__))
            with answering(settings, job.sources, runtime.folder, journal, times.now, __version__) as asked:
                outcome = _run_recorded(job, runtime, zygotes, signals, run_folder, recorder, times, asked, within)
    finally:
        run_folder.close()
        for handler in logger.handlers:
            handler.close()
        files.close(_LAST_FILES_S)
    return outcome


def _run_recorded(
    job: Job,
    runtime: Runtime,
    zygotes: ZygotePool,
    signals: SignalPipe,
    run_folder: RunFolder,
    recorder: Recorder,
    times: NodeTimes,
    asked: tuple[NodeStatus, Asking],
    within: bool,
) -> Outcome:
    """Runs the job with everything that records it in place, and records its end. Returns the outcome. Reports an error
    to the console and to torch's reply file."""
    config = job.launch_config
    nccl_bound = nccl.detection(os.environ | nccl.variables(job.settings.nccl, os.environ), config.max_restarts)
    recorder.job_started(
        config.run_id, job.name, job.command, config.max_restarts, config.nproc_per_node, job.settings.monitor
    )
    memory = open_memory(job, runtime, recorder)
    agents: list[NodeAgent] = []

    def launch() -> Mapping[int, Any]:
        """Makes rendezvous, parts and agent, and runs the agent. Returns the values of functions by global rank."""
        peer_names.look_up_no_more(torch)
        if not config.run_id:
            # As torch's launcher does for a program that gave no run id.
            config.run_id = str(uuid.uuid4().int)
        rendezvous = choose_rendezvous(job, signals)
        begin_copies(memory, job, rendezvous.is_ours and rendezvous.has_several_nodes)
        together = bool(job.settings.record.per_cycle_applog_prefix)
        if job.logs_specs_name is None or together:
            if together:
                redirects = Std.ALL
            else:
                redirects = job.redirects
            config.logs_specs = CycleLogs(run_folder, runtime.folder, redirects, job.tee, job.local_ranks_filter)
        folders = [str(runtime.folder), *filter(None, [job.log_dir])]
        is_alone = config.max_nodes == 1 and not job.settings.members.spares
        health = NodeHealth(job.settings.health, folders, runtime.tag, is_alone=is_alone)
        parts = NodeParts(
            settings=job.settings,
            runtime=runtime,
            recorder=recorder,
            times=times,
            signals=signals,
            ports=rendezvous.ports,
            zygotes=zygotes,
            health=health,
            health_watch=health.repeated(),
            memory=MemoryReclaim(job.settings.stop, runtime.tag),
            shared_memory=SharedMemoryCleanup(is_on=not within),
            state_in_memory=memory,
            injected=Injected(job.settings.start.inject, runtime.folder / "m0", job.no_python),
            cycle_info=CycleInfo(job.settings.record, os.environ),
            limits_set=limits_set(job.settings.monitor, job.sources),
            in_process_limits=job.settings.restart.in_process_limits_set(keys_set(job.sources)),
            more_sources=partial(_more_sources, *asked),
            more_environment=_more_environment(job.settings, recorder, memory),
            nccl_bound=nccl_bound,
            several_nodes=rendezvous.has_several_nodes,
            named_signals=job.named_signals,
            adopt_orphans=not within,
            is_script=job.is_script,
        )
        spec = worker_spec(config, job.entrypoint, job.args, rendezvous.make())
        agents.append(NodeAgent(spec, parts=parts, **agent_arguments(config)))
        return run_agent(agents[0], config)

    def summary(error: ChildFailedError) -> str:
        """Returns the block about the failed ranks. If that fails, one line has to do."""
        hidden, text = agents[0].results.hidden if agents else (), f"{error.name} FAILED"
        with contained("the summary of the ranks that failed cannot be shown"):
            text = console_text.failed_ranks(error.name, error.failures, recorder.shown, hidden)
        return text

    try:
        # Inside a user's program nothing is printed and no reply is written: the caller raises the error.
        outcome = _outcome(launch, (lambda text: None) if within else console_text.show_lines, summary)
        # Where an agent was made, its exit code counts: it knows preemption, and what all nodes agreed on.
        if agents and agents[0].exit_code is not None:
            outcome = replace(outcome, code=agents[0].exit_code, reason=agents[0].reason or outcome.reason)
        if agents and memory.flush is not None:
            flush(memory, outcome.code, end_time(job, signals, agents[0].grace_ends_at), recorder)
    finally:
        memory.close()
        runtime.template.goodbye = memory.goodbye()
    if outcome.error is not None and not within:
        write_reply(outcome.error)
    recorder.job_ended(outcome.code, outcome.reason, times.finish())
    ending = ending_signals(job)
    memory.free(lambda: any(number in ending for number in (*signals.arrived, *signals.peek())))
    runtime.template.goodbye = memory.goodbye()
    return outcome


def _more_sources(
    status: NodeStatus, asking: Asking, ranks: Ranks, rendezvous: NodeRendezvous | None
) -> list[EventSource]:
    """Plugs the tools into the agent: returns the event sources by which status and `--ft-watch-log` see the ranks.

    Called once by the node agent, when it is made.

    Args:
        status: gets the readings of ranks.
        asking: has the requests of the status servers.
        ranks: the ranks of this node.
        rendezvous: None where it is not ours; then other nodes cannot be asked.
    """
    parts = ranks.parts
    if rendezvous is not None:
        rendezvous.waiting = status.waits
        rendezvous.on_question = NodeAnswers(status, asking, parts.times, rendezvous).on_question
        asking.other_nodes = JobNodes(rendezvous)
    sources: list[EventSource] = [StatusFeed(status, asking, ranks)]
    if parts.settings.record.watch_log is not None:
        from ft_launcher.tools.training_log.log_feed import LogFeed  # 10 ms, which other jobs need not wait

        sources.append(LogFeed(parts, ranks))
    return sources


def _more_environment(
    settings: Settings, recorder: Recorder, memory: JobFolder
) -> Callable[[int, bool], Mapping[str, str]]:
    """Returns a function that says which variables the ranks of a cycle get by which they keep state in memory, and
    those that the tools add.

    Its arguments: the cycle, and whether rank 0 starts on this node.
    """
    of_memory = memory.variables()
    if settings.monitor.save_interval != AUTO:
        return lambda cycle, has_rank0: of_memory
    from ft_launcher.tools.report.save_intervals import SaveIntervals  # 12 ms, which other jobs need not wait

    intervals = SaveIntervals(settings.record.journal_dir, recorder)
    # Every node chooses, though only the choice for rank 0 counts: a restart in process may make another rank rank 0
    # later.
    return lambda cycle, has_rank0: {**of_memory, env.SAVE_INTERVAL: str(intervals.choose(cycle, has_rank0))}


def write_reply(error: BaseException) -> None:
    """Writes the file that TORCHELASTIC_ERROR_FILE names for the launcher, as torchrun's `@record` does.

    Schedulers read it. It has the error file of the rank that failed first, with its exit code, or the error that ended
    the launcher. A failure to write it is logged, and changes no exit code.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        _reply(get_error_handler(), error)
    except Exception as problem:  # the exit code stays what it is
        logger.warning("the reply file %s cannot be written: %s: %s", path, type(problem).__name__, problem)


def _reply(handler: ErrorHandler, error: BaseException) -> None:
    """Writes the reply by torch's error handler, which looks at the exception that is being handled."""
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
    """Runs `launch`, and returns the outcome with the exit code to use where the agent has none. Catches everything.

    Args:
        launch: runs the agent; returns the values of functions.
        show: prints lines to the console.
        summary: returns the block about failed ranks.
    """

    def say(text: str) -> None:
        show(console_line(text, time.time()))

    try:
        values = launch()
    except ChildFailedError as error:
        show(summary(error))
        return Outcome(int(ExitCode.RANKS_FAILED), "ranks failed", error=error)
    except SignalException as error:  # before an agent was made; else the agent has the exit code
        return Outcome(died_of(error.sigval), str(error), error=error)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = f"the rendezvous failed: {one_line(error)}"
        remedy = "Check --rdzv-endpoint or --master-addr, and the other nodes"
        say(f"{reason.rstrip('.')}. {remedy}")
        return Outcome(int(ExitCode.RENDEZVOUS_FAILED), reason, error=error)
    except FtError as error:
        say(str(error))
        return Outcome(error.exit_code, str(error), error=error)
    except Exception as error:
        refused = why_refused(error)
        if refused:
            reason = f"the system refused: {refused}"
            say(reason)
            return Outcome(int(ExitCode.LAUNCHER_ERROR), reason, error=error)
        reason = f"{type(error).__name__}: {one_line(error)}"
        say(f"error of the launcher itself: {reason}")
        show(traceback.format_exc())
        return Outcome(int(ExitCode.LAUNCHER_ERROR), reason, error=error)
    return Outcome(int(ExitCode.OK), "all ranks succeeded", values)


def _set_up_logging(job: Job, files: FileThread) -> None:
    """Sends our own log lines to stderr, and to a file where one is configured.

    Args:
        files: the thread that writes the file, so that a slow file system delays no line on the console.

    Raises:
        ConfigError: the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].setFormatter(console_text.ConsoleFormatter())
    logfile = job.settings.record.nvrx_logfile
    if logfile:
        try:
            mode = Access(job.settings.record.log_group_access).file_mode
            descriptor = open_own(logfile, os.O_WRONLY | os.O_APPEND, mode)
            handlers.append(FileHandler(os.fdopen(descriptor, "a", errors="backslashreplace"), files))
        except OSError as error:
            source = job.sources.get("nvrx_logfile", "settings")
            raise ConfigError("nvrx_logfile", logfile, source, str(error.strerror), "Name a file to write") from None
    for handler in handlers[1:]:
        handler.setFormatter(console_text.LineFormatter("%(asctime)s ft_launcher %(levelname)s: %(message)s"))
    logger.handlers = handlers
    logger.propagate = False
    logger.setLevel("DEBUG" if os.environ.get(env.DEBUG) else job.settings.monitor.log_level)
    for warning in job.warnings:
        logger.warning(warning)
