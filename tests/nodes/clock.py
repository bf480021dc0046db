"""A wall clock of a node's own, which a test can step while the node's processes run. Other clocks stay true.

Time namespaces move no wall clock, and libfaketime as Debian has it breaks `time.sleep` of Python 3.11 when the other
clocks are to stay true (its bug 426). So a small library stands between a process and the C library; what asks the
kernel past the C library sees the true time, and who waits for a moment when the clock is stepped goes on waiting.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from tests.program import run

_SOURCE = Path(__file__).with_name("clock.c")


def unavailable() -> str:
    """Why no clock can be stepped here; empty when one can."""
    return "" if shutil.which("cc") else "no C compiler is installed"


class Clock:
    """The wall clock of the processes that have `environ`, kept with its library in `folder` under a name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file, self._library = folder / f"{name}.clock", folder / f"{name}.clock.so"
        self._file.write_bytes(struct.pack("q", 0))
        words = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(self._library)]
        run([*words, str(_SOURCE), "-ldl"], check=True)

    @property
    def environ(self) -> Mapping[str, str]:
        """What a process must find set when it starts."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_FILE": str(self._file)}

    def step(self, seconds: float) -> None:
        """From now on the clock is so far ahead of the true time, or behind."""
        with self._file.open("r+b") as file:  # the same file, which the processes have mapped
            file.write(struct.pack("q", round(seconds * 1e9)))
