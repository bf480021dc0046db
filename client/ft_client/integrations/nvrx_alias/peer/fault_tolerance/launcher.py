"""`python -m nvidia_resiliency_ext.fault_tolerance.launcher ...` becomes `python -m ft_launcher ...`.

Scripts also take the parser of the command line from here, to read a `FaultToleranceConfig` from it.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from typing import NoReturn


def get_args_parser() -> ArgumentParser:
    """Returns our launcher's parser: torch's options and ours. Imports torch."""
    from ft_launcher.settings.command_line import make_parser

    return make_parser()


def main() -> NoReturn:
    """Runs our launcher in place of this process, with the same words."""
    os.execv(sys.executable, [sys.executable, "-m", "ft_launcher", *sys.argv[1:]])


if __name__ == "__main__":
    main()
