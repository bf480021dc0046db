"""The demo's training with injected faults: replaces functions of `train.py`, which does not know of it.

Each process carries at most one fault: the first in the list that has not been injected yet. A marker file in the
output folder says that a fault was injected, so a restarted run gets past it and on to the next fault.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import train


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """A process that hangs for good: it neither dies nor answers."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk() -> None:
    """The next file that the training makes durable fails half-way."""
    mock.patch.object(train, "os", SimpleNamespace(fsync=no_space)).start()


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Fault:
    """`inject` is called on `rank` as it enters `function` for the `call`-th time since it was (re)started."""

    name: str
    rank: int
    function: str
    call: int
    inject: Callable[[], None]


FAULTS = (
    Fault("killed-in-a-step", 1, "train_step", 60, kill),
    Fault("stopped-in-a-step", 1, "train_step", 60, stop),
    Fault("exception-while-checkpointing", 0, "save_checkpoint", 9, fill_disk),
)


def arm(fault: Fault, marker: Path) -> None:
    original = getattr(train, fault.function)
    calls = itertools.count(1)

    def with_fault(*args: Any) -> Any:
        if next(calls) == fault.call:
            marker.touch()
            fault.inject()
        return original(*args)

    setattr(train, fault.function, with_fault)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_known_args()[0].out
    out.mkdir(parents=True, exist_ok=True)
    markers = {fault: out / f"fault.{fault.name}" for fault in FAULTS}
    ahead = next((fault for fault in FAULTS if not markers[fault].exists()), None)
    if ahead and ahead.rank == int(os.environ["RANK"]):
        arm(ahead, markers[ahead])
    train.main()


if __name__ == "__main__":
    main()
