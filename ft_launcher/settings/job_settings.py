"""Makes a `Job` from a parsed command line: torch's `LaunchConfig`, the command of a rank, and our settings.

`cli.py` calls `make_job`, also for a dry run and for `validate`; `python_api.py` makes a `Job` of its own from a
`LaunchConfig`, and uses the checks here. Nothing is started or connected: all that can be wrong with options is found
before the first process.

torch's public `config_from_args` makes the `LaunchConfig`, so that defaults are those of the installed torch. Three
things that torch's `run` settles before that call are settled here, by the rules of the newest release: `--standalone`,
the free port of a single node, and the port of several nodes. Uses torch's underscored `_parse_rendezvous_config`.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed import run as torch_run
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.launcher.api import LaunchConfig

from ft_launcher.decide.policy.restart_policy import about_policy
from ft_launcher.settings import options, rank_program
from ft_launcher.settings.command_line import Parsed
from ft_launcher.settings.line_pattern import check_expression
from ft_launcher.settings.prescan import Scan, settle_threads
from ft_launcher.settings.rendezvous_check import RANK, about_unused, check_members, check_rendezvous, sorts_nodes
from ft_launcher.settings.sources import Resolved
from rank_monitor.contract.errors import nearest
from rank_monitor.contract.settings.config import Settings

StdMap: TypeAlias = "Std | dict[int, Std]"

SIGNALS = "signals_to_handle"
"""The name of `--signals-to-handle` in torch's namespace. Older releases of torch do not have it."""
STATIC_PORT = 29500
"""Torch's default of `--master-port`, used with the static rendezvous."""
_FREE_PORT = "localhost:0"
"""The endpoint that stands for a free port of this host, as in torch's `run`."""
_PYTHON = "PYTHON_EXEC"
"""The variable by which torchrun's users name the interpreter of the ranks."""
_NO_EVENTS = "null"
"""Torch's default of `--event-log-handler`."""
_NO_ID = "none"
"""Torch's default of `--rdzv-id`."""
_MAX_NAME = 64
"""Characters of each of the two parts of a job's name. A line of a terminal and a name of a folder have room for
them."""
_MADE_UP = 6
"""Characters that are shown of a run id that nobody chose: enough that two jobs on one host never share them by
chance."""
# Forms of `--redirects` and `--tee`.
_STD_MAP = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
# torch would make a log folder for its own log specifications. Ours replace these, so torch's go to the null device.
_NO_LOGS = {"log_dir": os.devnull, "redirects": "0", "tee": "0"}


@dataclass(frozen=True)
class Job:
    """Everything that the launcher needs to run one job on this node. `composition.py` runs it.

    Attributes:
        settings: ours, merged from all sources.
        sources: key of a setting -> where its value is from.
        warnings: lines to show when the job starts.
        launch_config: torch's, as torchrun would have it.
        entrypoint: the program of the ranks, or a function.
        args: what torchrun would give the program. Our bootstrap comes in between only when ranks start, so that torch
            names the user's script in what it logs and raises.
        log_dir: None: no files.
        redirects, tee, local_ranks_filter: as the user gave them, for any local rank.
        logs_specs_name: an entry point of the user's. With it `launch_config.logs_specs` is the user's; else it makes
            no files, and ours are used.
        script: the program's name, for messages.
        no_python: the ranks run another program than Python.
        named_signals: those of `--signals-to-handle`, where the user gave the option.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...]
    launch_config: LaunchConfig
    entrypoint: Any
    args: tuple[Any, ...]
    log_dir: str | None
    redirects: StdMap
    tee: StdMap
    local_ranks_filter: set[int] | None
    logs_specs_name: str | None
    script: str
    no_python: bool
    named_signals: frozenset[int] = frozenset()

    @property
    def command(self) -> list[str]:
        """The command line of the ranks; for a function only its name."""
        if isinstance(self.entrypoint, str):
            return [self.entrypoint, *self.args]
        return [self.script]

    @property
    def name(self) -> str:
        """What people call the job: `--ft-job-name`, else the script's name and what tells jobs of one script apart.

        The name is the same on all nodes. The second part is the run id, shortened where nobody chose it, or the port
        of the rendezvous where there is no run id.
        """
        given = self.settings.record.job_name
        if given is not None:
            return given
        script = Path(self.script.removeprefix("-m ")).name.removesuffix(".py")
        config = self.launch_config
        apart = str(config.run_id)
        if _is_made_up(apart):
            apart = apart[:_MADE_UP]
        elif apart in ("", _NO_ID):
            # Several nodes without a run id: no two jobs use one port at the same time.
            apart = str(config.rdzv_endpoint).rpartition(":")[2]
        return "-".join(part[:_MAX_NAME] for part in (script, apart) if part)

    @property
    def chosen_run_id(self) -> str:
        """The run id that the user chose; empty: nobody did."""
        run_id = str(self.launch_config.run_id)
        if run_id == _NO_ID or _is_made_up(run_id):
            return ""
        return run_id

    @property
    def folder_name(self) -> str:
        """The name of the folder of logs. As torchrun's, it is the run id where the user chose that and no name."""
        if self.settings.record.job_name is None and self.chosen_run_id:
            return self.chosen_run_id
        return self.name

    @property
    def node_rank(self) -> str:
        """The number of this node where it is known from the start; else empty."""
        return str(self.launch_config.rdzv_configs.get(RANK, ""))

    @property
    def is_script(self) -> bool:
        """Whether our Python runs a script or module: `args` are then `-u [-m] SCRIPT ...`."""
        return isinstance(self.entrypoint, str) and not self.no_python


def make_job(parsed: Parsed, resolved: Resolved, seen: Scan, environ: MutableMapping[str, str]) -> Job:
    """Returns the job that a command line describes.

    Args:
        parsed: the command line.
        resolved: our settings.
        seen: what was guessed before torch was imported.
        environ: `OMP_NUM_THREADS` is set in it where torchrun would set it.

    Raises:
        ConfigError: an option of torch is wrong, the script cannot be run, or a setting needs a package that is
            missing.
    """
    namespace = parsed.namespace
    _check_what_runs(namespace, environ)
    check_expression(resolved.settings.record, resolved.sources)
    check_numbers(parsed)
    check_event_handler(parsed)
    ranks: int = parsed.read("nproc_per_node", torch_run.determine_local_world_size)
    if ranks < 1:
        raise parsed.error("nproc_per_node", "at least one rank is needed")
    redirects = parsed.read("redirects", _std_map)
    tee = parsed.read("tee", _std_map)
    shown = parsed.read("local_ranks_filter", _local_ranks)
    warnings = [*_about_standalone(namespace), *resolved.warnings]
    if resolved.settings.start.alias_nvrx:
        warnings += _set_nvidias_backend(parsed)
    if namespace.logs_specs is not None and resolved.settings.record.per_cycle_applog_prefix:
        warnings.append("--ft-per-cycle-applog-prefix wins: --logs-specs is not used")
    warnings += about_names(getattr(namespace, SIGNALS, ""))
    threads = settle_threads(seen, ranks, environ)
    conf = parsed.read("rdzv_conf", _parse_rendezvous_config)
    config, entrypoint, args = _from_torch(_with_endpoint(parsed), ranks)
    warnings += _settle_rendezvous(config, conf, parsed, resolved)
    warnings += about_policy(resolved.settings.restart, config.max_nodes)
    if threads:
        warnings.append(threads)
    script = namespace.training_script
    if namespace.module:
        script = f"-m {script}"
    return Job(
        settings=resolved.settings,
        sources=resolved.sources,
        warnings=tuple(warnings),
        launch_config=config,
        entrypoint=entrypoint,
        args=tuple(args),
        log_dir=namespace.log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=shown,
        logs_specs_name=namespace.logs_specs,
        script=script,
        no_python=namespace.no_python,
        named_signals=_named_signals(parsed),
    )


def _is_made_up(run_id: str) -> bool:
    """Returns whether a run id is one that torch or this launcher made up: a UUID."""
    try:
        uuid.UUID(run_id)
    except ValueError:
        return False
    return True


def _settle_rendezvous(config: LaunchConfig, conf: Mapping[str, Any], parsed: Parsed, resolved: Resolved) -> list[str]:
    """Leaves the keys that apply in torch's configuration. Returns warnings about keys and options without effect.

    Args:
        config: torch's; its run id and its `rdzv_configs` are changed.
        conf: the keys that the user gave.
    """
    if not parsed.namespace.standalone and parsed.namespace.rdzv_id != _NO_ID:
        # For a job of one node torch makes up a run id, although the user has named the job by one.
        config.run_id = parsed.namespace.rdzv_id
    settled = check_rendezvous(config, conf, parsed)
    of_torch = {key: config.rdzv_configs[key] for key in config.rdzv_configs.keys() - conf}
    config.rdzv_configs = {**settled.conf, **of_torch}
    if sorts_nodes(config.rdzv_backend) and parsed.is_from_user("node_rank"):
        config.rdzv_configs[RANK] = parsed.namespace.node_rank
    check_members(config, resolved.settings.members, resolved.sources)
    return [*settled.warnings, *about_unused(config, parsed, resolved)]


def _set_nvidias_backend(parsed: Parsed) -> list[str]:
    """Sets the backend c10d where a batch script for NVIDIA's launcher names an endpoint only. Returns a warning.

    NVIDIA's launcher has no other backend. With torch's default, static, each node would take itself for the first.
    """
    namespace = parsed.namespace
    _, most = torch_run.parse_min_max_nnodes(namespace.nnodes)
    is_chosen = any(parsed.is_from_user(dest) for dest in ("rdzv_backend", "node_rank"))
    if most == 1 or is_chosen or namespace.standalone or not namespace.rdzv_endpoint:
        return []
    namespace.rdzv_backend = "c10d"
    return ["--rdzv-backend=c10d, the default of NVIDIA's launcher, holds under --ft-alias-nvrx"]


def _named_signals(parsed: Parsed) -> frozenset[int]:
    """Returns the signals of `--signals-to-handle` where the user gave the option, else none."""
    if not parsed.is_from_user(SIGNALS):
        return frozenset()
    named: frozenset[int] = parsed.read(SIGNALS, named_signals)
    return named


def named_signals(names: str) -> frozenset[int]:
    """Returns the numbers of the signals in a list of names. Unknown names are left out.

    Raises:
        ValueError: no process can handle one of them.
    """
    numbers = frozenset(numbers_of(names))
    impossible = numbers & {signal.SIGKILL, signal.SIGSTOP}
    if impossible:
        name = signal.Signals(min(impossible)).name
        raise ValueError(f"{name} cannot be handled by a process")
    return numbers


def about_names(names: str) -> list[str]:
    """Returns a warning about each name in `--signals-to-handle` that is not a signal of this system."""
    known = signal.Signals.__members__
    unknown = [name for name in map(str.strip, names.split(",")) if name and name not in known]
    return [f"--signals-to-handle: {name} is not a signal, left out{nearest(name, known)}" for name in unknown]


def numbers_of(names: str) -> tuple[int, ...]:
    """Returns the numbers of the signals in a list like `SIGTERM,SIGINT`. Unknown names are left out, as in torch."""
    known = (getattr(signal, name.strip(), None) for name in names.split(","))
    return tuple(int(number) for number in known if isinstance(number, signal.Signals))


def _check_what_runs(namespace: Namespace, environ: Mapping[str, str]) -> None:
    """Checks the program of the ranks in the way in which it will be started.

    The script of another interpreter is not checked: both may exist in its container only.

    Raises:
        ConfigError: it cannot be run.
    """
    if namespace.no_python and namespace.module:
        raise options.UsageError(
            "--no-python and -m exclude each other", "A module needs Python: leave out --no-python"
        )
    elif namespace.no_python:
        rank_program.check_command(namespace.training_script)
    elif environ.get(_PYTHON):
        rank_program.check_python(environ[_PYTHON], _PYTHON)
    elif not namespace.module:
        rank_program.check_script(namespace.training_script)


def check_numbers(parsed: Parsed) -> None:
    """Checks the numbers among torch's options, which torch itself checks late, or not at all.

    Raises:
        ConfigError: one of them is wrong.
    """
    namespace = parsed.namespace
    min_nodes, max_nodes = parsed.read("nnodes", torch_run.parse_min_max_nnodes)
    if not 1 <= min_nodes <= max_nodes:
        raise parsed.error("nnodes", "must be at least 1, and MIN not above MAX", "Write N or MIN:MAX")
    if namespace.max_restarts < 0:
        raise parsed.error("max_restarts", "must not be negative")
    if not namespace.monitor_interval > 0:
        raise parsed.error("monitor_interval", "must be above 0")
    if namespace.master_port is not None and not 0 <= namespace.master_port <= 65535:
        raise parsed.error("master_port", "ports lie between 0 and 65535")
    if namespace.rdzv_backend == "static" and not 0 <= namespace.node_rank < max_nodes:
        raise parsed.error("node_rank", f"must be below the number of nodes, {max_nodes}")
    if namespace.standalone and min_nodes > 1:
        raise parsed.error("nnodes", "--standalone is for one node", "Leave out one of the two")


def check_event_handler(parsed: Parsed) -> None:
    """Checks `--event-log-handler`, which torch looks up only when the job ends.

    Raises:
        ConfigError: torch has no handler of that name.
    """
    name = getattr(parsed.namespace, "event_log_handler", _NO_EVENTS)
    try:
        get_logging_handler(name)
    except KeyError:
        hint = "Torch's own are null and console"
        raise parsed.error("event_log_handler", "is not a handler that torch knows", hint) from None


def _about_standalone(namespace: Namespace) -> list[str]:
    """Returns a warning about options that `--standalone` overrides. torch overrides them without a warning."""
    if not namespace.standalone:
        return []
    kept = {"rdzv_backend": ("static", "c10d"), "rdzv_endpoint": ("",), "rdzv_id": ("none",)}
    lost = [f"--{dest.replace('_', '-')}" for dest, same in kept.items() if getattr(namespace, dest) not in same]
    if lost:
        return [f"--standalone wins: {', '.join(lost)} is not used"]
    return []


def _std_map(text: str) -> StdMap:
    """Parses `--redirects` or `--tee`: `3` for all ranks, or `0:3,10:1` by local rank.

    Raises:
        ValueError: the text has neither form.
    """
    if not _STD_MAP.fullmatch(text):
        raise ValueError("must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank like 0:3,10:1")
    if ":" not in text:
        return Std(int(text))
    pairs = (part.split(":") for part in text.split(","))
    return {int(local_rank): Std(int(streams)) for local_rank, streams in pairs}


def _local_ranks(text: str) -> set[int] | None:
    """Parses `--local-ranks-filter`: `0,1,2`; None for an empty text, which means all ranks.

    Raises:
        ValueError: the text has another form.
    """
    if not text:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ValueError("must be local ranks like 0,1,2")
    return {int(number) for number in text.split(",")}


def _with_endpoint(parsed: Parsed) -> Namespace:
    """Returns a copy of the namespace with what torch's `run` adds to it: an endpoint for a job of one node, or a port.

    A single node without a chosen port gets a free one, as in later releases of torch. torch 2.6 takes 29500 instead,
    on which two jobs of one machine collide.
    """
    asked = copy(parsed.namespace)
    _, most = torch_run.parse_min_max_nnodes(asked.nnodes)
    is_static = asked.rdzv_backend == "static" and not asked.rdzv_endpoint
    if asked.standalone or (is_static and most == 1 and not parsed.is_from_user("master_port")):
        asked.rdzv_backend = "c10d"
        asked.rdzv_endpoint = _FREE_PORT
        asked.rdzv_id = str(uuid.uuid4())
    if asked.master_port is None:
        asked.master_port = STATIC_PORT
    return asked


def _from_torch(asked: Namespace, ranks: int) -> tuple[LaunchConfig, str, list[str]]:
    """Returns what torchrun would launch: `LaunchConfig`, command, and arguments of the command. Changes the namespace.

    Args:
        asked: the namespace.
        ranks: how many ranks this node has, as torch counted them.

    Raises:
        ConfigError: torch refuses an option.
    """
    asked.nproc_per_node = str(ranks)
    if asked.rdzv_backend != "static":  # torch would warn that it ignores them; `about_unused` says more
        asked.node_rank = 0
        del asked.master_addr
    asked.run_path = False  # torch would run the script by `runpy`, in processes without our bootstrap
    if asked.logs_specs is None:
        vars(asked).update(_NO_LOGS)
    try:
        config, command, arguments = torch_run.config_from_args(asked)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise options.UsageError(f"torch does not take this command line: {error}") from None
    return config, command, arguments
