"""What runs in a rank before the user's script: `python -u -m ft_client.bootstrap [-m] SCRIPT ARGS`.

Registers the stack dump, connects to the monitor, starts the watchdog, then runs the script exactly as `python` would.
Whatever of ours fails, the script runs. Loads nothing at its top: the current folder, which `-m` puts first into
`sys.path`, must hide nothing of what we need. (Started by its path, `python -u .../bootstrap.py`, it does the same, and
the interpreter's own search for the module is safe from files in the current folder too.)
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
"""In the place of a script: the function that the agent sends through the descriptor named after it."""


def load() -> None:
    """Imports what `prepare`, `Rank` and most scripts need of this package. The zygote calls it once for its forks."""
    from ft_client import short_forms  # noqa: F401
    from ft_client.rank.monitoring import exception_report, process  # noqa: F401
    from ft_client.rank.start import after_import, script  # noqa: F401
    from rank_monitor.contract import exit_codes  # noqa: F401


def rank() -> Rank:
    """This process as the rank that its command line names, ready to run."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -u -m ft_client.bootstrap [-m] SCRIPT [ARGS]")
    first_path = _pop_first_path()
    return Rank(main_of(arguments, first_path), prepare())


def prepare(tells_modules: bool = False) -> Report:
    """Connects this process to its monitor as the rank, and sets torch's default timeout. Raises nothing.

    Args:
        tells_modules: whether the rank is to send which modules its program has imported: a fork may be asked to.

    Returns:
        What reports how the rank ends: called with the exception, with None where the rank exits with an error and
        without a known exception, and with `SystemExit()` where the program returned.
    """
    try:
        # Imported now: later, the script's folder comes first in sys.path.
        from ft_client.rank.monitoring import exception_report, process
        from ft_client.rank.start import after_import
        from rank_monitor.contract import env, exit_codes  # noqa: F401 (the latter for `Rank`)

        if env.ALIAS_NVRX in os.environ:  # a fork, or our `.pth` is not installed
            from ft_client.integrations import nvrx_alias

            nvrx_alias.install_if_asked()
        after_import.set_collective_timeout()
        after_import.answer_monitor()
        process.start(own=True, tells_modules=tells_modules)
        exception_report.keep_stderr()
        return exception_report.report
    except Exception as error:
        print(f"ft_client: this rank is not watched: {type(error).__name__}: {error}", file=sys.stderr)
        return lambda error, trace: None


def main_of(arguments: list[str], first_path: str | None) -> Main:
    """The script, or the function that the agent sends.

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
    """Runs a function in a fork that has it already. `channel`: to the agent."""
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

        # These two are not there when `prepare` failed.
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
        # First in, so last to run: the script's threads and exit functions may still work with other ranks.
        atexit.register(self._report_return)
        self.act_on_loaded = after_import.act_on_loaded
        """To be called when a fork got modules that its zygote has imported."""

    def __enter__(self) -> Rank:
        return self

    def prepare_program(self) -> Callable[[], object]:
        """Sets up the faults on purpose that were asked for. Returns what runs the main program; keeps no reference."""
        start_clocks = _set_up_faults()
        start_clocks()
        self._script.release_own_names()
        return self._main.prepare_program()

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
        is_agreed = isinstance(error.code, int) and error.code in self._agreed
        why = _handled_error(error)
        if is_agreed or why is None:
            self._try_to_report(None, None, _exit_code(error), is_reported=not is_agreed)
        elif why is error:
            self._try_to_report(why, theirs, _exit_code(error))
        else:
            self._try_to_report(why, why.__traceback__, _exit_code(error))

    def _report_return(self) -> None:
        if self._has_returned:
            self._try_to_report(SystemExit(), None)

    def _try_to_report(
        self, error: BaseException | None, trace: TracebackType | None, failed_with: int = 0, is_reported: bool = True
    ) -> None:
        """Reports how the program ended.

        Args:
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
    """The exit code of a process that this exception ends; minus the number of the signal for one of Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return -2  # SIGINT: the module `signal` is not loaded in a fresh interpreter
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def _is_zero(code: object) -> bool:
    """Whether `sys.exit(code)` ends the process with the exit code 0, of which the system keeps eight bits."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def _handled_error(wish: SystemExit) -> BaseException | None:
    """The exception that the program handled by exiting with an error, as hydra and typer do; None if there is none.

    These print it themselves. `sys.exit` with a text is itself the error.
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
    """Sets up the faults on purpose that were asked for, if any. Returns what starts their clocks."""
    env = sys.modules.get("rank_monitor.contract.env")  # not there when `prepare` failed
    try:
        if env is not None and not os.environ.keys().isdisjoint((env.INJECT, env.SIMULATED_FAULT)):
            from ft_client.inject import requested_faults

            return requested_faults.set_up()
    except Exception as error:
        print(f"ft_client: no fault was set up: {type(error).__name__}: {error}", file=sys.stderr)
    return lambda: None


def _pop_first_path() -> str | None:
    """Removes the entry of `sys.path` that the interpreter made for us; returns the one it would make for `-m`.

    None in safe-path mode, where it makes none.
    """
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    del sys.path[0]
    return os.getcwd()  # noqa: PTH109 (nothing is loaded before this)


if __name__ == "__main__":
    from ft_client import bootstrap  # noqa: PLW0406 (this copy ends here: `__main__` becomes the script's)

    with bootstrap.rank() as started:
        started.prepare_program()()
