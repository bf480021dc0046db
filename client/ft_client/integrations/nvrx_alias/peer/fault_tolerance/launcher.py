"""`python -m nvidia_resiliency_ext.fault_tolerance.launcher ...` becomes `python -m ft_launcher ...`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs our launcher in place of this process, with the same words."""
    os.execv(sys.executable, [sys.executable, "-m", "ft_launcher", *sys.argv[1:]])


if __name__ == "__main__":
    main()
