"""`launch` and `LaunchConfig`: the whole launcher inside a user's program, for a function or a script.

`composition.py` runs the job, with parts that suit a program that already has torch, threads and children of its own.
Signal handlers, environment and log handlers of the program are restored afterwards, and its children are left alone.

Which settings exist is declared in the contract. `LaunchConfig` gives its keywords the form of a parsed command line
(`Keywords`), so that `settings/sources.py` merges them with YAML and environment in the same way as options, and the
same checks apply. Uses torch's underscored attributes of `DefaultLogsSpecs`.

    from ft_launcher import LaunchConfig, launch

    def train(path):
        ...
        return loss

    if __name__ == "__main__":
        config = LaunchConfig(nproc_per_node=2, max_restarts=3, rank_heartbeat_timeout=600)
        losses = launch(train, config)("config.yaml")  # {0: ..., 1: ...}
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from multiprocessing import process
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as TorchLaunchConfig
from torch.distributed.run import get_args_parser

from ft_launcher import composition
from ft_launcher.decide.policy.restart_policy import about_policy
from ft_launcher.node.processes.signals import SignalPipe, children_reported, to_handle
from ft_launcher.node.ranks import function_rank
from ft_launcher.node.ranks.runtime import Runtime
from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.settings import job_settings, options, rank_program, sources
from ft_launcher.settings.command_line import Parsed
from ft_launcher.settings.job_settings import SIGNALS, Job, check_event_handler, check_numbers, named_signals
from ft_launcher.settings.line_pattern import check_expression
from ft_launcher.settings.prescan import Scan
from ft_launcher.settings.rendezvous_check import Settled, about_unused, check_members, check_rendezvous
from rank_monitor.contract.errors import ConfigError, FtError, nearest
from rank_monitor.contract.settings.config import GROUPS

_SOURCE = "LaunchConfig"
"""The source of a setting that a keyword gave, as errors name it."""
_FIELDS = tuple(field.name for field in fields(TorchLaunchConfig))
"""The fields of torch's `LaunchConfig`, as far as the installed torch has them."""
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""A variable that torch sets in this process for its own use. It is restored afterwards."""

_running = threading.Lock()
"""Held during a run: one process has one set of signal handlers and one console."""


@dataclass(frozen=True)
class Keywords(Parsed):
    """Keywords of `LaunchConfig` in the form of a parsed command line."""

    def source_of(self, dest: str) -> str:
        """Returns the source of every value: `LaunchConfig`."""
        return _SOURCE


class LaunchConfig(TorchLaunchConfig):  # type: ignore[misc]
    """How a job is launched: the fields of torch's class, and every setting of ours by its key.

    As on the command line, a setting that is not given comes from the environment (`FT_<KEY>`), from the YAML file that
    `cfg_path` names, or from its default. `none` or None means no limit. All fields of torch have defaults here: one
    node with one rank, the rendezvous c10d, no log files. Settings can also be read and set as attributes. Copy a
    configuration by `copy.copy`: `dataclasses.replace` knows torch's fields only.

    Raises:
        TypeError: there is no such keyword.
        ConfigError: a value is wrong. Values are checked when the object is made and at each assignment.

    Example:
        `LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=8, max_restarts=3, rank_section_timeouts="step:600")`
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        keys = {name: _key(name) for name in keywords}
        ours = {key: keywords.pop(name) for name, key in keys.items() if key is not None}
        for name in keywords:
            if name not in _FIELDS:
                near = nearest(name, (*_FIELDS, *options.GROUP_OF, *options.ALIASES))
                raise TypeError(f"LaunchConfig has no option {name!r}{near}")
        values = {**dict(zip(_FIELDS, args, strict=False)), **keywords}
        least = {"min_nodes": 1, "max_nodes": values.get("min_nodes", 1), "nproc_per_node": 1, "rdzv_backend": "c10d"}
        if values.get("logs_specs") is None:
            keywords["logs_specs"] = DefaultLogsSpecs(log_dir=os.devnull)
        self.__dict__.update(_settings=ours, _stop_s=values.get("shutdown_timeout"))
        super().__init__(*args, **{name: value for name, value in least.items() if name not in values}, **keywords)
        self.resolved()

    @classmethod
    def of(cls, config: TorchLaunchConfig) -> LaunchConfig:
        """Returns a configuration of ours with the fields of torch's, and no setting: these come from the environment,
        from YAML, or are defaults. One of ours is returned as it is.

        Raises:
            ConfigError: a value is wrong for this launcher.
        """
        if isinstance(config, cls):
            return config
        return cls(**{name: getattr(config, name) for name in _FIELDS})

    def resolved(self) -> sources.Resolved:
        """Returns the merged settings, with the source of each. Reads environment and YAML anew.

        Raises:
            ConfigError: names every wrong value of any source.
        """
        return sources.resolve(self.keywords(), os.environ)

    def keywords(self) -> Keywords:
        """Returns the values in the form of a parsed command line; torch's fields get the names of its options."""
        ours: dict[str, Any] = {key: _plain(value) for key, value in vars(self)["_settings"].items()}
        theirs = {name: getattr(self, name) for name in _FIELDS}
        more = {
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "node_rank": int(self.rdzv_configs.get("rank", 0)),
            "rdzv_conf": self.rdzv_configs,
            "master_port": None,
            "standalone": False,
            "shutdown_timeout": vars(self)["_stop_s"],
        }
        return Keywords(Namespace(**theirs | more), ours, dict.fromkeys(ours, _SOURCE), frozenset(_FIELDS))

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a setting, merged from all sources."""
        key = _key(name)
        if key is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(getattr(self.resolved().settings, _ATTRIBUTE_OF[key]), key)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field of torch, or a setting. A wrong value of a setting leaves the configuration as it was."""
        key = _key(name)
        if key is None:
            super().__setattr__(name, value)
            return
        before = vars(self)["_settings"]
        self.__dict__["_settings"] = {**before, key: value}
        try:
            self.resolved()
        except Exception:
            self.__dict__["_settings"] = before
            raise


class LaunchError(FtError):
    """The job failed although no rank of this node did. `exit_code` is that of the command `ft_launcher` in the same
    case."""


class RankTraceback(Exception):
    """The traceback of the rank that failed first, as text: the cause of the error that `launch` raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].rstrip()}\n"""'


def launch(entrypoint: Callable[..., Any] | str, config: TorchLaunchConfig) -> Callable[..., dict[int, Any]]:
    """Returns the launcher for a function or a script: `launch(train, LaunchConfig(nproc_per_node=2))("config.yaml")`.

    The returned callable takes the positional arguments, and returns when the job has ended. Ranks are watched,
    restarted and recorded as by the command `ft_launcher`. Only one run at a time is possible in one process.

    With start method fork, a rank has function and arguments already. With spawn and forkserver the function is found
    by its name, so that it must be at the top level of a module or script (whose start is under
    `if __name__ == "__main__":`), and arguments are pickled as in multiprocessing. No other program can write these
    pickles: each is in sealed memory without a name, passed through a socketpair that only this process and its own
    rank hold. The return value of a function is sent back in the same way, pickled by value.

    A rank ends when its function has returned. If its process does not end then, for instance because of a thread, it
    is stopped after `workers_stop_timeout`, and has succeeded. `sys.exit(0)` returns None; `os._exit(0)` is a failure.

    In the main thread the signals of `signals_to_handle` end the job. In another thread Python allows no handlers:
    signals are then left to the program.

    Args:
        entrypoint: a function; a Python script; or a command, as `sys.executable` with `"-u", "script.py"`.
        config: nodes and ranks, and all settings. torch's own class will do: its fields count, and settings of ours
            come from the environment and from YAML (`LaunchConfig.of`).

    Returns:
        A callable: positional arguments -> global rank -> what the function returned, for the ranks of this node (None
        for a script's).

    Raises:
        ChildFailedError: torch's; ranks failed and are not restarted any more. Its cause has the rank's own traceback.
        SignalException: torch's; this process got a signal to end.
        ConfigError: a value is wrong, or the function cannot be sent to another process.
        Exception: any other error of the launcher, such as torch's RendezvousError. Each has the attribute `exit_code`,
            that of the command in the same case.
    """
    if not isinstance(config, TorchLaunchConfig):
        raise TypeError(f"launch(entrypoint, config) needs a LaunchConfig, not {type(config).__name__}")
    if not isinstance(entrypoint, str) and not callable(entrypoint):
        raise TypeError(f"launch(entrypoint, config) needs a function or a path, not {type(entrypoint).__name__}")
    return partial(_launch, entrypoint, LaunchConfig.of(config))


def _launch(entrypoint: Callable[..., Any] | str, config: LaunchConfig, *args: Any) -> dict[int, Any]:
    """What `launch` returns, with its first two arguments."""
    return run_job(lambda: job_of(entrypoint, args, config))


def run_job(make_job: Callable[[], Job]) -> dict[int, Any]:
    """Runs one job within this program. Raises what ended it, with the exit code of the command as its attribute
    `exit_code`.

    Args:
        make_job: returns the job, once it is sure that no other one runs here. What it raises ends the call.

    Raises:
        RuntimeError: a rank that was spawned imports the user's program, which calls `launch` outside of its main
            guard.
        FtError: another run is under way in this process.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch() was called while a rank imports the program: "
            "put the call under `if __name__ == '__main__':`, so that only the program itself makes it"
        )
    if not _running.acquire(blocking=False):
        raise FtError("another launch() runs in this process; start them one after the other")
    try:
        with _as_found(), children_reported():
            outcome = _conduct(make_job())
    except FtError as wrong:
        raise wrong from None
    finally:
        _running.release()
    if outcome.error is None and outcome.code == 0:
        return dict(outcome.values)
    error = outcome.error or LaunchError(outcome.reason)
    error.exit_code = outcome.code  # type: ignore[attr-defined]
    # Without our frames, which hold the launcher's sockets for as long as somebody keeps the error.
    raise error.with_traceback(None) from _cause(error)


def _conduct(job: Job) -> composition.Outcome:
    """Runs a job with parts for a program. Returns the outcome; what it started has ended then, and all is closed.

    A signal that arrives when nothing is left to end goes to the program's own handler, after ours have been removed.
    """
    zygotes = ZygotePool(apart=True)
    runtime = Runtime.start()
    signals = None
    try:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            signals = SignalPipe(to_handle(composition.ending_signals(job), job.named_signals))
        else:
            signals = SignalPipe(())
        function = not isinstance(job.entrypoint, str)
        if not function or job.launch_config.start_method == "spawn":
            arguments: Sequence[str] = ()
            if function:
                arguments = [job.script]
            elif job.is_script:
                arguments = job.args[1:]
            zygotes.prepare_apart(arguments, function, job.settings.start, runtime.tag)
        outcome = composition.conduct(job, runtime, zygotes, signals, within=True)
        if isinstance(outcome.error, SignalException):
            late = []
        else:
            late = signals.read()
    finally:
        zygotes.close()
        runtime.close()
        if signals is not None:
            signals.close()
    for number in late:  # it came when nothing was left to end: the program's own handler takes it
        signal.raise_signal(number)
    return outcome


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """Context that restores environment and log handlers of the program at its end."""
    value = os.environ.get(_VARIABLE)
    logger = logging.getLogger("ft_launcher")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    try:
        yield
    finally:
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
        if value is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = value


def _cause(error: BaseException) -> BaseException | None:
    """Returns the traceback of the rank that failed first, if the rank left one; else the cause that the error has."""
    if isinstance(error, ChildFailedError):
        message = error.get_first_failure()[1].message
        if isinstance(message, dict):
            text = message.get("extraInfo", {}).get("py_callstack", "")
        else:
            text = ""
        if text:
            return RankTraceback(text)
        return None
    return error.__cause__


def job_of(entrypoint: Callable[..., Any] | str, args: Sequence[Any], config: LaunchConfig) -> Job:
    """Returns the job that `launch` runs.

    Raises:
        ConfigError: a value is wrong, the script does not exist, or the function cannot be sent to another process.
    """
    resolved = config.resolved()
    if resolved.settings.start.dry_run:
        raise ConfigError("dry_run", True, resolved.sources["dry_run"], "only the command can do that", "Leave it out")
    settled = _check(config, resolved)
    if config.warm_start == "on" and config.start_method != "spawn" and callable(entrypoint):
        raise ConfigError("warm_start", "on", resolved.sources["warm_start"], "goes with start_method='spawn' only")
    ours = copy.copy(config)
    # A copy, since the run changes its configuration, and the user may launch with the same one again.
    ours.rdzv_configs = dict(settled.conf)
    ours.run_id = config.run_id or uuid.uuid4().hex
    if type(config.logs_specs) is DefaultLogsSpecs:
        log_dir, redirects, tee, shown = log_places(config.logs_specs)
        logs_specs_name = None
    else:
        log_dir, redirects, tee, shown = None, 0, 0, None
        logs_specs_name = type(config.logs_specs).__name__
    entry, arguments, name, no_python = _what_runs(entrypoint, args, config.start_method)
    return Job(
        settings=resolved.settings,
        sources=resolved.sources,
        warnings=(*resolved.warnings, *settled.warnings, *about_policy(resolved.settings.restart, config.max_nodes)),
        launch_config=ours,
        entrypoint=entry,
        args=tuple(arguments),
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=shown,
        logs_specs_name=logs_specs_name,
        script=name,
        no_python=no_python,
        named_signals=_named_signals(config),
    )


def job_of_namespace(namespace: Namespace) -> Job:
    """Returns the job of a command line that torch's own parser has read, as programs do that call
    `torch.distributed.run.run`. Settings of ours come from the environment and from YAML.

    Raises:
        ConfigError: a value is wrong, or the script cannot be run.
    """
    parser = get_args_parser()
    given = {name for name, value in vars(namespace).items() if value != parser.get_default(name)}
    values = copy.copy(namespace)
    for action in parser._actions:  # programs that make the namespace themselves have texts in the place of numbers
        value = getattr(values, action.dest, None)
        if callable(action.type) and isinstance(value, str):
            setattr(values, action.dest, action.type(value))
    parsed = Parsed(values, texts={}, spelled={}, from_user=frozenset(given))
    resolved = sources.resolve(parsed, os.environ)
    return job_settings.make_job(parsed, resolved, Scan(ranks=None, starts_ranks=True), os.environ)


def _check(config: LaunchConfig, resolved: sources.Resolved) -> Settled:
    """Checks a configuration as a command line is checked. Returns the keys of the rendezvous that apply, and warnings.

    Raises:
        ConfigError: a value is wrong.
    """
    keywords = config.keywords()
    check_numbers(keywords)
    check_event_handler(keywords)
    check_expression(resolved.settings.record, resolved.sources)
    if config.nproc_per_node < 1:
        raise keywords.error("nproc_per_node", "at least one rank is needed")
    if config.start_method not in function_rank.START_METHODS:
        raise keywords.error("start_method", f"must be one of {', '.join(function_rank.START_METHODS)}")
    check_members(config, resolved.settings.members, resolved.sources)
    settled = check_rendezvous(config, config.rdzv_configs, keywords)
    return replace(settled, warnings=(*settled.warnings, *about_unused(config, keywords, resolved)))


def _named_signals(config: LaunchConfig) -> frozenset[int]:
    """Returns the signals that a configuration names; none where it has torch's default."""
    default: Any = {field.name: field.default for field in fields(config)}.get(SIGNALS, "")
    asked = getattr(config, SIGNALS, default)
    with config.keywords().errors_of(SIGNALS):
        if asked == default:
            return frozenset()
        return named_signals(asked)


def _what_runs(
    entrypoint: Callable[..., Any] | str, args: Sequence[Any], start_method: str
) -> tuple[Any, Sequence[Any], str, bool]:
    """Returns entry point and arguments as torch takes them, the name of the program, and whether it is no Python
    script.

    A script runs by this interpreter, a function by our own entry, everything else as a command.

    Raises:
        ConfigError: it cannot be run, or the function cannot be sent to another process.
    """
    if not isinstance(entrypoint, str):
        entry = function_rank.FunctionEntry(entrypoint)
        if start_method != "fork":
            function_rank.check(entry, args)
        return entry, args, repr(entry), False
    arguments = [str(argument) for argument in args]
    if entrypoint == sys.executable and arguments[:1] == ["-u"]:
        return entrypoint, arguments, " ".join(arguments[1:2]), False
    if entrypoint.endswith(".py") or os.path.isdir(entrypoint):  # noqa: PTH112 (torch's entry point is text)
        rank_program.check_script(entrypoint)
        return sys.executable, ["-u", entrypoint, *arguments], entrypoint, False
    rank_program.check_command(entrypoint)
    return entrypoint, arguments, entrypoint, True


_ATTRIBUTE_OF = {
    key: attribute for key, group in options.GROUP_OF.items() for attribute, of in GROUPS.items() if of is group
}
"""Key of a setting -> the attribute of `Settings` with its group."""


def _key(name: str) -> str | None:
    """Returns the key that a keyword or attribute means, also by another name of the setting; None: it is no
    setting."""
    key = options.ALIASES.get(name, name)
    if key in options.GROUP_OF:
        return key
    return None


def _plain(value: object) -> object:
    """Returns a value as YAML would have it: an enum's value, and text for a path."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def log_places(specs: DefaultLogsSpecs) -> tuple[str | None, Any, Any, set[int] | None]:
    """Returns log folder (None: no logs), redirects, tee and filter of torch's own log specifications."""
    if specs._root_log_dir in (None, os.devnull):
        folder = None
    else:
        folder = str(specs._root_log_dir)
    return folder, specs._redirects, specs._tee, specs._local_ranks_filter
