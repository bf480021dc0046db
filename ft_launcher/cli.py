"""The program `ft_launcher`: from the arguments of a command line to an exit code.

The script of that name calls `program`, and `__main__.py` calls `launch`. A launch does its steps in the order that
matters:

1. standard streams and SIGCHLD, which a parent may have left in a state that breaks children;
2. `prescan`, which reads what must be known before torch is imported;
3. the fork of the zygote, before our own modules are loaded, so that a rank finds none of them;
4. torch, the command line, the settings and the job (`make_job`);
5. the run (`composition.py`).

So nothing at the top of this file may import torch. A rank that is forked later comes back out of step 3: `launch`
returns in the rank, and only there.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.settings import prescan
from ft_launcher.settings.options import UsageError
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.errors import FtError, why_refused
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode
from rank_monitor.contract.installed import file_of
from rank_monitor.contract.processes import proc

if TYPE_CHECKING:
    from ft_launcher.node.zygote.forked_rank import ForkedRank
    from ft_launcher.settings.command_line import Parsed
    from ft_launcher.settings.job_settings import Job
    from ft_launcher.settings.sources import Resolved

SUBCOMMANDS = {
    "bundle": "ft_launcher.tools.commands.bundle",
    "replay": "ft_launcher.tools.commands.replay",
    "report": "ft_launcher.tools.commands.report",
    "stacks": "ft_launcher.tools.commands.status",
    "status": "ft_launcher.tools.commands.status",
    "top": "ft_launcher.tools.commands.top",
    "validate": "ft_launcher.tools.commands.validate",
}
"""Subcommand -> the module with the command of that name."""
_PROCESS_NAME = "pt_elastic"
"""What `ps` and `top` show for this process: the name that torchrun gives itself."""
_PEER = "nvidia_resiliency_ext"
"""The package of NVIDIA that also installs a program `ft_launcher`."""


def program() -> NoReturn:
    """The entry point of the script `ft_launcher`. A forked rank runs here, in the outermost of our frames; see
    `launch`."""
    rank = launch()
    with rank:
        rank.prepare_program()()
    rank.end()


def launch() -> ForkedRank:
    """Runs the launcher and ends this process. Returns only in a forked rank, which has the stack of the caller.

    The process is ended by `os._exit`: to finalize an interpreter with torch loaded takes 0.4 s. What a normal end does
    is done here: exit functions, and the flushing of logs and streams.

    Returns:
        In a rank: what prepares the rank and gives the user's program. The caller runs the program in its own frame, so
            that a traceback of the user has no more frames of ours than necessary.
    """
    _open_standard_streams()
    # Where a parent ignores SIGCHLD, the kernel drops the exit codes of children. Zygote and ranks inherit the default
    # from here.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    arguments = sys.argv[1:]
    zygotes = ZygotePool()
    try:
        with _errors_shown(is_subcommand(arguments)):
            _must_have_folder()
            seen = prescan.prepare_threads(prescan.scan(arguments, os.environ), os.environ)
            if seen.starts_ranks and not is_subcommand(arguments):
                rank = zygotes.begin(seen.against_forks)
            else:
                rank = None
        if rank is not None:
            return rank
        main(arguments, seen, zygotes)
    except SystemExit as ended:
        code = ended.code
    # `os._exit` skips all of this.
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if not isinstance(code, int):
        code = int(code is not None)
    os._exit(code)


def _open_standard_streams() -> None:
    """Opens the null device where one of the descriptors 0 to 2 is closed.

    Otherwise a socket could get such a number, and output would be written into it. Python sets these streams to None,
    which neither log handlers nor the zygote can write to.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115  (for the life of the process)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def main(arguments: Sequence[str], seen: prescan.Scan, zygotes: ZygotePool) -> NoReturn:
    """Runs the program and exits.

    Args:
        arguments: the command line without the program's name.
        seen: what was guessed before torch was imported.
        zygotes: the zygote that has been forked, if one has.

    Raises:
        SystemExit: always, with the exit code.
    """
    with _errors_shown(is_subcommand(arguments)):
        if is_subcommand(arguments):
            code = _subcommand(arguments)
        else:
            code = _job(arguments, seen, zygotes)
    sys.exit(code)


@contextlib.contextmanager
def _errors_shown(is_command: bool) -> Iterator[None]:
    """Context that turns errors into lines on the console and exit codes.

    An error that names its cause (`FtError`, or a refusal of the system) becomes one line; any other error is a bug and
    shows its traceback.

    Args:
        is_command: whether the lines answer a command, so that they have no time; else they are lines of a job.

    Raises:
        SystemExit: with the exit code, where there was an error.
    """
    try:
        yield
        return
    except FtError as error:
        _show(str(error), is_command)
        _reply(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        refused = why_refused(error)
        if refused:
            _show(f"the system refused: {refused}", is_command)
        else:
            traceback.print_exc()
        _reply(error)
        code = int(ExitCode.LAUNCHER_ERROR)
    sys.exit(code)


def _show(text: str, is_command: bool) -> None:
    """Prints a line to stderr, in the form of a command or of a job."""
    if is_command:
        line = f"ft_launcher: {text}"
    else:
        line = console_line(text, time.time())
    print(line, file=sys.stderr)


def _reply(error: Exception) -> None:
    """Writes torch's reply file where the launcher was given one. Imports torch, and only then.

    A wrong command line gets no reply, as under torchrun.
    """
    if os.environ.get("TORCHELASTIC_ERROR_FILE") and not isinstance(error, UsageError):
        from ft_launcher.composition import write_reply

        write_reply(error)


def _must_have_folder() -> None:
    """Checks that the current folder exists. In a removed folder the import of torch ends the process silently (by
    MKL).

    Raises:
        UsageError: the current folder is gone.
    """
    try:
        os.getcwd()  # noqa: PTH109 (only asked for)
    except OSError as error:
        hint = "Change to one that is there"
        raise UsageError(f"the current folder cannot be used: {error.strerror}", hint) from None


def is_subcommand(arguments: Sequence[str]) -> bool:
    """Returns whether the first argument is a subcommand. A script of that name wins, and `ft_launcher -- validate`
    always runs a script."""
    return bool(arguments) and arguments[0] in SUBCOMMANDS and not Path(arguments[0]).exists()


def _subcommand(arguments: Sequence[str]) -> int:
    """Runs a subcommand. Returns the exit code.

    Raises:
        UsageError: the subcommand's command line is wrong.
        SystemExit: the subcommand ends with another code than 0.
    """
    import click

    name = arguments[0]
    command: click.Command = getattr(importlib.import_module(SUBCOMMANDS[name]), name)
    try:
        command.main(args=list(arguments[1:]), prog_name=f"ft_launcher {name}", standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(error.format_message(), f"See ft_launcher {name} --help") from None
    return int(ExitCode.OK)


def _job(arguments: Sequence[str], seen: prescan.Scan, zygotes: ZygotePool) -> int:
    """Runs a job, or describes it for a dry run. Returns the exit code. Blocks until the end of the job."""
    from ft_launcher.node.ranks.runtime import Runtime
    from ft_launcher.record.console import console
    from rank_monitor.contract.processes import resolver

    resolver.bound_process()  # for the launcher alone: the zygote was forked before, so ranks have the usual limits
    console.quiet_torch()
    if seen.starts_ranks:
        runtime = Runtime.start()
    else:
        runtime = None

    def prepare(parsed: Parsed, resolved: Resolved) -> None:
        """Has the zygote import torch and the preloaded modules, while the launcher goes on with its own imports."""
        if runtime is not None and not resolved.settings.start.dry_run:
            source = resolved.sources.get("warm_start", "the default")
            zygotes.prepare(parsed.script_arguments(), resolved.settings.start, source, runtime.tag)

    try:
        job = make_job(arguments, seen, os.environ, prepare)
        if job.settings.start.dry_run:
            return _describe(job)
        runtime = runtime or Runtime.start()
        from ft_launcher.composition import run

        proc.name_this_process(_PROCESS_NAME)
        return run(job, runtime, zygotes)
    finally:
        zygotes.close()
        if runtime is not None:
            runtime.close()


def make_job(
    arguments: Sequence[str],
    seen: prescan.Scan,
    environ: MutableMapping[str, str],
    once_read: Callable[[Parsed, Resolved], None] = lambda parsed, resolved: None,
) -> Job:
    """Returns the job of a command line. Imports torch.

    Args:
        arguments: the command line without the program's name.
        seen: what was guessed before torch was imported.
        environ: the environment, which may be changed.
        once_read: called when command line and settings are known, and torch has not yet looked at this machine, which
            takes a while on a node with GPUs.

    Raises:
        ConfigError: an option or setting is wrong.
        SystemExit: the user asked for help, which was printed.
    """
    from ft_launcher.settings import command_line, job_settings, sources

    parsed = command_line.parse(arguments)
    resolved = sources.resolve(parsed, environ, _peer_note())
    once_read(parsed, resolved)
    return job_settings.make_job(parsed, resolved, seen, environ)


def _peer_note() -> tuple[str, ...]:
    """Returns a note on which program this is, where NVIDIA's package is installed too; else none."""
    if file_of(importlib.util.find_spec(_PEER)) is None:
        return ()
    from ft_launcher import __version__

    return (f"this is ft_launcher {__version__}; {_PEER} is installed too and has a program of that name",)


def _describe(job: Job) -> int:
    """Prints what would be started, and warnings. Returns the exit code."""
    from ft_launcher.tools.commands.dry_run import describe

    for warning in job.warnings:
        print(f"ft_launcher: {warning}", file=sys.stderr)
    print(describe(job, os.environ))
    return int(ExitCode.OK)
