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
    from types import TracebackType

    Report = Callable[[BaseException, TracebackType | None], None]


def main() -> None:
    """Runs what the command line names."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -u -m ft_client.bootstrap [-m] SCRIPT [ARGS]")
    first_path = _take_first_path()
    report = prepare()
    run(arguments, first_path, report)


def prepare() -> Report:
    """Connects this process to its monitor, as the rank that the launcher started.

    Returns:
        How to report an exception that ends the rank.
    """
    try:
        from ft_client import process
        from ft_client.exception_report import report  # now: later, the script's folder comes first in sys.path

        process.start(own=True)
        return report
    except Exception as error:
        print(f"ft_client: this rank is not watched: {type(error).__name__}: {error}", file=sys.stderr)
        return lambda error, trace: None


def run(arguments: list[str], first_path: str | None, report: Report) -> None:
    """Runs the script; an exception that ends it is reported on its way out.

    Args:
        arguments: `[-m] SCRIPT ARGS`.
        first_path: the first entry of `sys.path` for `-m`; None in safe-path mode.
        report: as from `prepare`.
    """
    from ft_client.script import Script, hide_frames

    script = Script(arguments, first_path)
    try:
        script.run()
    except SystemExit:
        raise
    except BaseException as error:
        hide_frames(script)
        try:
            report(error, script.below(error.__traceback__))
        except Exception as problem:
            print(f"ft_client: the exception was not reported: {type(problem).__name__}: {problem}", file=sys.stderr)
        raise


def _take_first_path() -> str | None:
    """Removes the entry of `sys.path` that the interpreter made for us; returns the one it would make for `-m`.

    None in safe-path mode, where it makes none.
    """
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    del sys.path[0]
    return os.getcwd()  # noqa: PTH109 (nothing is loaded before this)


if __name__ == "__main__":
    from ft_client import bootstrap  # noqa: PLW0406 (this copy ends here: `__main__` becomes the script's)

    bootstrap.main()
