"""Runs scripts three ways - by plain `python -u`, by exec of our bootstrap, as forks of one zygote - and tells it all.

A program of its own, since a zygote is forked from a process with one thread. Its argument is a JSON file with a list
of runs; it writes beside it what each way came to. Judges nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from ft_launcher.node.processes.process_tree import become_subreaper
from ft_launcher.node.zygote.client import RankOrder
from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.settings import rank_program
from rank_monitor.contract.settings.config import StartSettings

LIMIT_S = 120

Start = Callable[[dict[str, Any], IO[bytes], IO[bytes]], Any]


class ListeningPool(ZygotePool):
    """Keeps its zygote when a rank says that it starts again by exec, and remembers what it said."""

    said: str = ""

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.said += os.read(self._reports[0], 1 << 16).decode() if self._reports else ""


def by_exec(*between: str) -> Start:
    def start(run: dict[str, Any], out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
        words, environ = [sys.executable, "-u", *between, *run["words"]], {**os.environ, **run["environ"]}
        return subprocess.Popen(words, env=environ, stdout=out, stderr=err, start_new_session=True)

    return start


def by_fork(zygotes: ZygotePool) -> Start:
    def start(run: dict[str, Any], out: IO[bytes], err: IO[bytes]) -> Any:
        from ft_launcher.node.ranks.rank_context import ForkedProcess

        streams = {1: out.fileno(), 2: err.fileno()}
        pids = zygotes.start_ranks([RankOrder(run["words"], {**os.environ, **run["environ"]}, streams)], numa=False)
        assert pids
        return ForkedProcess(pids[0])

    return start


def came_to(folder: Path, number: int, run: dict[str, Any], start: Start) -> list[Any]:
    """Exit code, stdout, stderr and written files of one run, in a fresh copy of its folder that has one name."""
    place, files = folder / "place", [folder / "out", folder / "err"]
    shutil.copytree(folder / "scripts" / str(number), place)
    os.chdir(place)
    with files[0].open("wb") as out, files[1].open("wb") as err:
        process = start(run, out, err)
    code = ended(process)
    written = {file.name: file.read_text() for file in sorted(place.glob("written*"))}
    printed = [file.read_text(errors="replace") for file in files]
    for file in files:
        file.unlink()  # what a process that outlives its script prints later is in no other run's file
    os.chdir(folder)
    shutil.rmtree(place)
    return [code, *printed, written]


def ended(process: Any) -> int:
    """The exit code, once there is one."""
    pidfd = os.pidfd_open(process.pid)
    if not select.select([pidfd], [], [], LIMIT_S)[0]:
        print(f"{process.pid} is ended after {LIMIT_S} s", file=sys.stderr)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
    os.close(pidfd)
    return int(process.poll())


def learn(zygotes: ZygotePool) -> None:
    """Has the zygote import what `DistributedDataParallel()` does, as after a rank's report."""
    zygotes.learn(["torch._dynamo"], {})
    deadline, learned = time.monotonic() + LIMIT_S, None
    while learned is None and time.monotonic() < deadline:
        select.select(list(zygotes.descriptors()), [], [], 1.0)
        zygotes.handle()
        learned = zygotes.pop_learned()
    assert learned is not None and learned.names == ["torch._dynamo"], learned


def main(table: Path, ways: Sequence[str], zygotes: ListeningPool) -> None:
    become_subreaper()
    zygotes.prepare(["nothing.py"], StartSettings(warm_start="on", preload=("auto",)), "a test", "tag-of-a-test")
    starts = {"plain": by_exec(), "exec": by_exec(rank_program.bootstrap()), "forked": by_fork(zygotes)}
    if "learned" in ways:
        learn(zygotes)
        starts["learned"] = by_fork(zygotes)
    found: list[dict[str, Any]] = []
    for number, run in enumerate(json.loads(table.read_text())):
        found.append({way: came_to(table.parent, number, run, starts[way]) for way in ways})
        zygotes.handle()
        found[-1]["said"], zygotes.said = zygotes.said, ""
    zygotes.close()
    table.with_name("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    pool = ListeningPool()
    rank = pool.begin("")
    if rank is not None:
        with rank:
            rank.prepare_program()()
        rank.end()
    main(Path(sys.argv[1]), sys.argv[2:], pool)
