"""The files that rank 0 writes for the next job: learned limits and finished flag.

`watched_fit.py` calls these functions on rank 0 only. A write is atomic: a reader sees the old file or the new one,
also when the writer dies. If a file cannot be read or written, a warning is logged and the training goes on. The names
of the files are those of NVIDIA's callbacks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from logging import Logger
from pathlib import Path
from typing import Any

from ft_client.rank.monitoring.learned_limits import learned_in
from rank_monitor.contract.wire.foreign import read_json

LIMITS = "_ft_state.json"
"""The name under which learned limits are written."""
_NAMES = (LIMITS, "_ft_state_.json")
"""The names under which learned limits are read. The first file that exists is used; the second is an older name."""


def read_limits(folder: Path, logger: Logger) -> dict[str, Any] | None:
    """Returns the state of `RankMonitorClient` that an earlier job wrote; None if there is no valid state.

    Args:
        folder: where the file is.
        logger: gets a warning about a file that is there but cannot be used.
    """
    for file in (folder / name for name in _NAMES):
        try:
            state = read_json(file, follow_link=True)
            if not learned_in(state):
                raise ValueError("it holds no learned limits")
            return dict(state)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as problem:
            logger.warning("%s is not used: %s", file, problem)
            return None
    return None


def write_limits(folder: Path, state: Mapping[str, Any], logger: Logger) -> None:
    """Writes learned limits for the next job, and makes the folder if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / LIMITS, json.dumps(state))
    except OSError as problem:
        logger.warning("the next job will not know the learned limits: %s", problem)


def write_finished_flag(file: Path, reason: str, logger: Logger) -> None:
    """Writes the finished flag, by which a loop of jobs sees that no further job is needed.

    Args:
        file: the flag's file; its folder must exist.
        reason: why the training is complete: the content of the file.
        logger: gets a line that says so, or a warning.
    """
    try:
        _write(file, f"{reason}\n")
        logger.info("training is complete (%s): wrote %s", reason, file)
    except OSError as problem:
        logger.warning("training is complete (%s), but the finished flag was not written: %s", reason, problem)


def _write(file: Path, text: str) -> None:
    """Writes a file under another name, waits until it is on the disk, and renames it."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
        try:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
            Path(new.name).chmod(0o644)
            Path(new.name).replace(file)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise
