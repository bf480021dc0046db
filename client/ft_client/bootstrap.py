"""What runs in a rank before the user's script: `python -u -m ft_client.bootstrap [-m] SCRIPT ARGS`.

It registers the stack dump, connects to the monitor, starts the watchdog, and then runs the script exactly as `python`
would. Whatever of ours fails, the script runs. At the end it reports how the program ended.

A rank that is a fork of the zygote calls the same functions (`ft_launcher/node/zygote/forked_rank.py`); the zygote has
called `load` before.

**Sequence:** `rank()` makes a `Rank`, and `prepare` connects. `with rank: rank.prepare_program()()` runs the program in
the outermost frame of the process. `Rank.__exit__` reports an exception, and an exit function reports that the program
has returned.

Nothing is loaded at the top of this file: the current folder, which `-m` puts first into `sys.path`, must hide nothing
of what we need. (Started by its path, `python -u .../bootstrap.py`, it does the same, and then the interpreter's own
search for this module is safe from files in the current folder too.)
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from types import TracebackType
    from typing import Any

    from ft_client.rank.start.script import Main

    Report = Callable[[BaseException | None, TracebackType | None], None]


FUNCTION = "--function"
"""Stands in the place of a script: a function is to be run, which the agent sends through the descriptor that
follows."""


def load() -> None:
    """Imports what `prepare`, `Rank` and most scripts need of this package. The zygote calls it once for its forks."""
    from ft_client import short_forms  # noqa: F401
    from ft_client.rank.monitoring import exception_report, process  # noqa: F401
    from ft_client.rank.start import after_import, script  # noqa: F401
    from rank_monitor.contract import exit_codes  # noqa: F401


def rank() -> Rank:
    """Returns the rank that the command line of this process names, connected and ready to run.

    Exits with a usage line where there is no script.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -u -m ft_client.bootstrap [-m] SCRIPT [ARGS]")
    first_path = _pop_first_path()
    return Rank(main_of(arguments, first_path), prepare())


def prepare(reports_modules: bool = False) -> Report:
    """Connects this process to its monitor as the rank, and sets torch's default timeout. Raises nothing.

    Where something fails, one line on stderr says so, and the program runs unwatched.

    Args:
        reports_modules: whether the rank is to send which modules its program has imported. The launcher asks one rank
            of each node to do so.

    Returns:
        What reports how the rank ends: called with the exception, with None where the rank exits with an error and
        without a known exception, and with `SystemExit()` where the program returned.
    """
    try:
        # Imported now: later, the script's folder comes first in sys.path.
        from ft_client.rank.monitoring import exception_report, process
        from ft_client.rank.start import after_import
        from rank_monitor.contract import env, exit_codes  # noqa: F401 (the latter for `Rank`)

        if env.ALIAS_NVRX in os.environ:  # in a fork, or where our `.pth` is not installed, nobody has done so yet
            from ft_client.integrations import nvrx_alias

            nvrx_alias.install_if_asked()
        after_import.set_collective_timeout()
        after_import.answer_monitor()
        process.start(own=True, reports_modules=reports_modules)
        exception_report.keep_stderr()
        return exception_report.report
    except Exception as error:
        print(f"ft_client: this rank is not watched: {type(error).__name__}: {error}", file=sys.stderr)
        return lambda error, trace: None


def main_of(arguments: list[str], first_path: str | None) -> Main:
    """Returns the main program: the script, or the function that the agent sends.

    Args:
        arguments: `[-m] SCRIPT ARGS`, or `--function CHANNEL [PARCEL]`, both descriptors.
        first_path: the first entry of `sys.path` for `-m`; None in safe-path mode.
    """
    if arguments[0] == FUNCTION:
        from ft_client.rank.start.function import Function

        return Function.from_agent(*map(int, arguments[1:]))
    from ft_client.rank.start.script import Script

    return Script(arguments, first_path)


def run_function(channel: socket, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs a function as the rank in a fork that has the function already. `channel`: to the agent."""
    report = prepare()
    from ft_client.rank.start.function import Function

    with Rank(Function(channel, (function, args)), report) as rank:
        rank.prepare_program()()


class Rank:
    """The rank's main program as a context manager: how the context is left is reported.

    Run it by `with rank: rank.prepare_program()()` in the outermost frame of the process. So this one frame of ours
    alone is below the script's frames: each frame of ours would be in every stack dump, and count towards the recursion
    limit.

    Args:
        main: what runs.
        report: as from `prepare`.
    """

    def __init__(self, main: Main, report: Report) -> None:
        # Imported now: later, the script's folder comes first in sys.path.
        import atexit

        from ft_client.rank.start import after_import, script

        # These two modules are not loaded where `prepare` has failed.
        self._reports = sys.modules.get("ft_client.rank.monitoring.exception_report")
        exit_codes = sys.modules.get("rank_monitor.contract.exit_codes")
        if exit_codes is None:
            self._agreed = ()
        else:
            self._agreed = exit_codes.AGREED
        self._main = main
        self._report = report
        self._script = script
        self._has_returned = False
        # Registered first, so called last: the script's threads and exit functions may still work with other ranks.
        atexit.register(self._report_return)
        self.act_on_loaded = after_import.act_on_loaded
        """To be called when a fork has got modules that its zygote has imported."""

    def __enter__(self) -> Rank:
        return self

    def prepare_program(self) -> Callable[[], object]:
        """Sets up the faults on purpose that were asked for, and loads the script or function (`Main.load_program`).

        From then on this process is what it is when the program begins.

        Returns the callable that runs the program. No reference to it is kept here.
        """
        start_clocks = _set_up_faults()
        start_clocks()
        self._script.release_own_names()
        return self._main.load_program()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and _is_zero(error.code)):
            self._has_returned = True
            return
        theirs = self._main.below(self._script.below(trace and trace.tb_next, {Rank.prepare_program.__code__}))
        if not isinstance(error, SystemExit):
            self._script.hide_frames(theirs)
            self._try_to_report(error, theirs, _exit_code(error))
            return
        # An exit with an error. Ranks that have agreed to exit report no error, only the code.
        is_agreed = isinstance(error.code, int) and error.code in self._agreed
        handled = _handled_error(error)
        if is_agreed or handled is None:
            self._try_to_report(None, None, _exit_code(error), is_reported=not is_agreed)
        elif handled is error:
            self._try_to_report(handled, theirs, _exit_code(error))
        else:
            self._try_to_report(handled, handled.__traceback__, _exit_code(error))

    def _report_return(self) -> None:
        """An exit function: reports that the program has returned, unless it ended with an error."""
        if self._has_returned:
            self._try_to_report(SystemExit(), None)

    def _try_to_report(
        self, error: BaseException | None, trace: TracebackType | None, failed_with: int = 0, is_reported: bool = True
    ) -> None:
        """Reports how the program ended. Raises nothing: what is reported must not change how the process ends.

        Args:
            error: as for `exception_report.report`.
            trace: the traceback without our frames.
            failed_with: the exit code, which is reported first; 0: the program did not fail.
            is_reported: whether the error is reported too; not where ranks have agreed to exit.
        """
        try:
            if failed_with and self._reports is not None:
                self._reports.report_failure(error, trace, failed_with)
            if is_reported:
                self._report(error, trace)
        except Exception as problem:
            print(f"ft_client: the exception was not reported: {type(problem).__name__}: {problem}", file=sys.stderr)


def _exit_code(error: BaseException) -> int:
    """Returns the exit code of a process that this exception ends; -2 for KeyboardInterrupt, by which Python ends
    itself with SIGINT."""
    if isinstance(error, KeyboardInterrupt):
        return -2  # SIGINT: the module `signal` is not loaded in a fresh interpreter
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def _is_zero(code: object) -> bool:
    """Whether `sys.exit(code)` ends the process with the exit code 0, of which the system keeps eight bits."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def _handled_error(wish: SystemExit) -> BaseException | None:
    """Returns the exception that the program handled by exiting with an error; None if there is none.

    hydra and typer do so: they print the exception themselves and call `sys.exit(1)`. `sys.exit` with a text is itself
    the error.
    """
    if isinstance(wish.code, str):
        return wish
    if wish.__suppress_context__:
        handled = wish.__cause__
    else:
        handled = wish.__context__
    if not isinstance(handled, Exception) or type(handled).__name__ == "Exit":  # click's, which only carries a code
        return None
    return handled


def _set_up_faults() -> Callable[[], None]:
    """Sets up the faults on purpose that were asked for, if any. Returns the callable that starts their clocks."""
    env = sys.modules.get("rank_monitor.contract.env")  # not loaded where `prepare` has failed
    try:
        if env is not None and not os.environ.keys().isdisjoint((env.INJECT, env.SIMULATED_FAULT)):
            from ft_client.inject import requested_faults

            return requested_faults.set_up()
    except Exception as error:
        print(f"ft_client: no fault was set up: {type(error).__name__}: {error}", file=sys.stderr)
    return lambda: None


def _pop_first_path() -> str | None:
    """Removes the entry of `sys.path` that the interpreter made for this module. Returns the entry that it would make
    for the user's `-m`; None in safe-path mode, where it makes none."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    del sys.path[0]
    return os.getcwd()  # noqa: PTH109 (nothing is loaded before this)


if __name__ == "__main__":
    from ft_client import bootstrap  # noqa: PLW0406 (this copy ends here: `__main__` becomes the script's)

    with bootstrap.rank() as started:
        started.prepare_program()()
