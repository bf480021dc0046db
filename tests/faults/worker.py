"""A rank: a small deterministic training that saves, resumes, and injects the faults of its plan.

Plain Python, so that it starts fast. Ranks go through their iterations in step with each other, as in a collective;
one that waits for others is alive, and says so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import ft_client as ft
from tests.faults import children
from tests.faults.injected import FAULTS, no_core_files
from tests.faults.training import CHECKPOINT_EVERY, ITERATIONS, Plan, State

_POLL_S = 0.005


class Training:
    """One rank in one cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = Plan.load(folder)
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.client = ft.RankMonitorClient()
        self.state = State()
        self.told = False

    def run(self) -> None:
        """Trains to the end, from the last checkpoint on."""
        self._introduce()
        self._inject("start")
        self.client.init_workload_monitoring()
        with self.client.section("setup"):
            self._inject("setup")
            if self._file("state").exists():
                self.state = State.of_json(self._file("state").read_text())
        while self.state.iteration < ITERATIONS:
            self._iterate()
        self._progress(ITERATIONS)
        self.client.shutdown_workload_monitoring()
        self._inject("end")

    def _iterate(self) -> None:
        iteration = self.state.iteration
        self._wait_for_peers(iteration)
        self.client.report_iteration(iteration)
        self._inject("between", iteration)
        with self.client.section("step"):
            self._inject("step", iteration)
            self.state.take(self.rank, self.world)
        self._save_if_told()
        if self.state.iteration % CHECKPOINT_EVERY == 0:
            with self.client.section("checkpointing"):
                self._inject("checkpointing", iteration)
                write(self._file("state"), self.state.to_json())

    def _file(self, what: str) -> Path:
        return self.folder / f"{what}-{self.rank}"

    def _introduce(self) -> None:
        """Leaves word of this process, starts what the plan wants started, and looks for what an earlier cycle left."""
        no_core_files()
        for folder in ("ranks", "children", "progress", "injected"):
            (self.folder / folder).mkdir(exist_ok=True)
        left = [
            child.pid for child in children.recorded(self.folder / "children", f"{self.cycle - 1}-*") if child.alive
        ]
        if self.plan.children:
            children.start(self.plan.children, self.folder / "children" / f"{self.cycle}-{self.rank}")
        self._handle_sigterm()
        facts = {"pid": os.getpid(), "cycle": self.cycle, "rank": self.rank, "left": left}
        write(self.folder / "ranks" / f"{self.cycle}-{self.rank}", json.dumps(facts))

    def _handle_sigterm(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            with self._file("sigterm").open("a") as stream:
                stream.write(f"{time.time()}\n")
            self.told = True

        if self.plan.saves_on_sigterm or self.rank in self.plan.stubborn_ranks:
            signal.signal(signal.SIGTERM, note)

    def _progress(self, iteration: int) -> None:
        write(self.folder / "progress" / f"{self.cycle}-{self.rank}", str(iteration))

    def _wait_for_peers(self, iteration: int) -> None:
        self._progress(iteration)
        with self.client.section("waiting"):
            while self.plan.hold == iteration and not (self.folder / "go").exists():
                self._wait()
            for peer in range(self.world):
                file = self.folder / "progress" / f"{self.cycle}-{peer}"
                while not file.exists() or int(file.read_text()) < iteration:
                    self._wait()

    def _save_if_told(self) -> None:
        if self.told and self.plan.saves_on_sigterm:
            write(self._file("state"), self.state.to_json())
            sys.exit(0)

    def _wait(self) -> None:
        self._save_if_told()
        self.client.send_heartbeat()
        time.sleep(_POLL_S)

    def _inject(self, where: str, iteration: int | None = None) -> None:
        for index, fault in enumerate(self.plan.faults):
            here = fault.where == where and (iteration is None or fault.iteration == iteration)
            if here and fault.rank in (None, self.rank) and self._first_time(index):
                if fault.rank is None:
                    self._wait_for_all(index)
                FAULTS[fault.what](self.client)

    def _wait_for_all(self, index: int) -> None:
        """All ranks at once: a late rank would be stopped with the first, and have its fault a cycle later."""
        while not all((self.folder / "injected" / f"{index}-{peer}").exists() for peer in range(self.world)):
            time.sleep(_POLL_S)

    def _first_time(self, index: int) -> bool:
        try:
            (self.folder / "injected" / f"{index}-{self.rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def write(file: Path, text: str) -> None:
    """Replaces a file as a whole, on the disk before it returns."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)


if __name__ == "__main__":
    Training(Path(sys.argv[1])).run()
