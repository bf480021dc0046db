"""The training's state in memory, as the composition root sees it: the folder at the start of a run, and the flush to
shared storage at the end.

`composition.py` calls `open_memory` before the agent is made, and `flush` when the agent has ended, both in the main
thread. What the job's key is made of is decided here, since only here command line, function and node rank are known
together.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import socket
import sys
import time
import uuid
from dataclasses import asdict
from types import SimpleNamespace

from ft_launcher.node.memory_files.adoption import job_key
from ft_launcher.node.memory_files.flush import EndTime
from ft_launcher.node.memory_files.job_folder import JobFolder
from ft_launcher.node.processes.signals import SignalPipe, time_to_end
from ft_launcher.node.ranks.runtime import Runtime
from ft_launcher.record.recorder import Recorder
from ft_launcher.settings.job_settings import Job
from ft_launcher.settings.sources import keys_set
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.settings.config import MemorySettings
from rank_monitor.contract.settings.declaration import declarations
from rank_monitor.contract.wire.job_secret import read_job_secret

logger = logging.getLogger("ft_launcher")

_REST_S = 2.0
"""Seconds of the time that a signal leaves which are kept for the end after the state in memory is written."""


def open_memory(job: Job, runtime: Runtime, recorder: Recorder) -> JobFolder:
    """Returns the folder in which ranks may keep the training's state in memory; it is not made where the user wants
    none (`--ft-memory-interval none`). Blocks for a moment where an earlier start left something."""
    settings = job.settings.memory
    if settings.memory_interval is None:
        return JobFolder(settings, runtime.tag)
    memory = JobFolder.open(settings, memory_key(job), runtime.tag, runtime.folder)
    if memory.refused:
        is_wanted = bool(declarations(MemorySettings).keys() & keys_set(job.sources))
        recorder.memory.no_folder(memory.refused, is_wanted)
    elif memory.found is not None:
        recorder.memory.found(memory.found.step, memory.found.reason, asdict(memory.found.left))
    if settings.memory_flush is not None and not memory.refused:
        memory.use_storage(settings.memory_flush, *keys_on_storage(job))
        if memory.flush is None:
            recorder.memory.not_flushed("another launcher of this job's key lives on this machine")
    return memory


def begin_copies(memory: JobFolder, job: Job, are_nodes_linked: bool) -> None:
    """Has the state in memory copied to other nodes, where the user wants that (`--ft-memory-buddies`).

    Args:
        memory: has the state.
        job: its run id is known by now.
        are_nodes_linked: whether the job may have several nodes, and these speak our protocol.

    Raises:
        ConfigError: the file with the job's secret cannot be used.
    """
    settings = job.settings.memory
    secret_file = job.settings.members.job_secret_file or ""
    if secret_file:
        # The process for copies starts elsewhere.
        secret_file = os.path.abspath(secret_file)  # noqa: PTH100 - a link stays one: what it names may change
        try:
            read_job_secret(secret_file)
        except ValueError as problem:
            source = job.sources.get("job_secret_file", "settings")
            remedy = "Give all nodes a file of the same 16 bytes or more"
            raise ConfigError("job_secret_file", secret_file, source, str(problem), remedy) from None
    if not settings.memory_buddies or memory.path is None:
        return
    if not are_nodes_linked:
        logger.warning(
            "--ft-memory-buddies %d: no state is copied, since the job has one node, or a rendezvous that is not ours",
            settings.memory_buddies,
        )
        return
    memory.use_buddies(job.launch_config.run_id, secret_file, settings.memory_buddies, settings.memory_bandwidth)


def flush(memory: JobFolder, code: int, ends_at: EndTime, recorder: Recorder) -> None:
    """Writes the newest state in memory to shared storage at the job's end, where another start may go on from it, and
    removes what is there after a success. Blocks as `Flush.write`.

    Args:
        memory: has the state.
        code: the exit code of this launcher.
        ends_at: until when this may take.
        recorder: says what became of it.
    """
    assert memory.flush is not None
    if code == ExitCode.OK:
        problem = memory.flush.forget()
        if problem:
            logger.warning("a state of this job may still be in --ft-memory-flush: %s", problem)
        return
    if code == ExitCode.FAILED_ON_RESULT_VALIDATION:
        recorder.memory.not_flushed("a result could not be validated, and the state may be wrong")
        return
    began, marked_from = time.monotonic(), memory.marked_from()
    written = memory.flush.write(memory.below, ends_at)
    if written.step is not None:
        recorder.memory.flushed(written.step, written.size, time.monotonic() - began)
    elif written.reason:
        recorder.memory.not_flushed(written.reason)
    elif marked_from is not None:
        text = f"the states of step {marked_from} and later ones may be bad, and there is no older one"
        recorder.memory.not_flushed(text)


def end_time(job: Job, signals: SignalPipe, grace_ends_at: float) -> EndTime:
    """Returns until when the end of this launcher may take.

    Args:
        grace_ends_at: when the time is over that the ranks had to save after a signal (monotonic seconds); infinity:
            there was none.
    """
    stop = job.settings.stop

    def arrived() -> list[int]:
        """Reads the signals, so that `EndLimit` knows that nobody stands still."""
        signals.read()
        return signals.arrived

    return EndTime(
        grace_ends_at - _REST_S,
        arrived,
        lambda arrived: min(stop.preemption_grace, time_to_end(arrived, stop.workers_stop_timeout)) - _REST_S,
    )


def memory_key(job: Job) -> str:
    """Returns what tells the state in memory of this job from that of others, the same in each of its starts.

    A function counts with its arguments and the program that launches it. Where that cannot be told, as with a function
    that cannot be pickled, the key is another one in each start: no state of another run may be taken over.
    """
    if job.chosen_run_id:
        return job_key(job.chosen_run_id, os.geteuid(), "", [], job.node_rank)
    return job_key("", os.geteuid(), *_command(job), job.node_rank)


def keys_on_storage(job: Job) -> tuple[str, str]:
    """Returns the job's key on shared storage, and what tells its command from others, also where `--rdzv-id` alone
    makes the key.

    All nodes have the key of a `--rdzv-id` in common. Without one each machine has a key of its own: two jobs of one
    command on different machines may be different runs, as those of a sweep by environment variables.
    """
    command = job_key("", os.geteuid(), *_command(job), "")
    if job.chosen_run_id:
        return job_key(job.chosen_run_id, os.geteuid(), "", [], ""), command
    return job_key("", os.geteuid(), socket.gethostname(), [command], ""), command


def _command(job: Job) -> tuple[str, list[str]]:
    """Returns the current folder and the command of the ranks; another one each time where these cannot be told."""
    try:
        return os.getcwd(), _all_that_runs(job)  # noqa: PTH109 (a text)
    except Exception:  # of a user's `__reduce__`; or the current folder is gone
        return "", [uuid.uuid4().hex]


def _all_that_runs(job: Job) -> list[str]:
    """Returns the command of the ranks. For a function: its name, a checksum of it with its arguments, and the command
    line of the program.

    Raises:
        Exception: the function or an argument cannot be pickled.
    """
    if isinstance(job.entrypoint, str):
        return job.command
    digest = hashlib.sha256()
    # Nothing reads the pickle. It is not kept in memory: a function that is forked may have gigabytes as its argument.
    pickle.Pickler(SimpleNamespace(write=digest.update)).dump((job.entrypoint, job.args))
    return [*sys.argv, *job.command, digest.hexdigest()]
