"""A launcher's status server with a simulated node of many ranks: `python -m scripts.bench.simulated_status RANKS`.

Has loaded what a launcher has before anybody asks it, and hangs in its journal. Writes its port and its memory then,
and, for each line that it reads, its memory now. Meanwhile its ranks go on, five steps a second.
"""

from __future__ import annotations

import itertools
import json
import select
import sys
import tempfile
import time
from pathlib import Path

import psutil

import ft_launcher.composition  # noqa: F401  (for its memory)
from ft_launcher.record import events
from ft_launcher.record.journal.journal import Journal
from ft_launcher.record.ledger.account import Account, CycleTimes
from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.tools.status.listening import answering
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from rank_monitor.contract.settings.config import RecordSettings, Settings
from rank_monitor.contract.wire.rank_times import Durations

from .ports import free_port

STEP_S = 0.2
FAULTS = 20
FRAMES = [f"torch/distributed/distributed_c10d.py:{2900 + number} in call_{number}" for number in range(20)]


def memory_mib() -> float:
    """Memory of this process that no file stands behind: pages of libraries are its own or shared, as others come and
    go that have loaded the same."""
    found = psutil.Process().memory_info()
    return float(found.rss - found.shared) / (1 << 20)


def times(step: int) -> JobTime:
    """The job's time, with as many categories and cycles as a page shows."""
    seconds = {f"custom:part {number}": 60.0 for number in range(10)} | {"step": 30_000.0, "data": 300.0}
    recovery = dict.fromkeys(("detection", "stop", "health", "rendezvous", "start", "first_step"), 1.5)
    parts = [CycleTimes(cycle, cycle * 1e3, cycle * 1e3 + 999, seconds, recovery=recovery) for cycle in range(20)]
    present = CycleTimes(20, 2e4, 3e4, seconds, step, step, saved=step - step % 100)
    durations = Durations()
    durations.add(1_900_000_000)
    return JobTime("", present, Account(seconds, sum(seconds.values()), 0.97, 0.96, step), {"step": durations}, parts)


def fail(journal: Journal, cycle: int, ranks: int) -> None:
    """A cycle with as many different stacks as are kept."""
    state = {"entered": 7, "finished": 6, "operation": "all_reduce", "shape": "[[4096, 4096]] ['Float']"}
    seen = [
        {"rank": rank, "place": "collective", "frames": [f"{rank % 40}.py:1 in main", *FRAMES], "process": {}}
        | {"groups": {str(group): state for group in range(10)}}
        for rank in range(ranks)
    ]
    journal.write(events.StacksEvent(cycle, seen))
    journal.write(
        events.FaultEvent(
            **{"cycle": cycle, "kind": "hang", "rank": 3, "local_rank": 3, "pid": 3, "exit_code": -9, "what": "hangs"},
            **{"where": "in section step", "hint": "", "iteration": 7, "limit": "step", "learned_limit": False},
            **{"detail": FRAMES, "others": FRAMES[:2], "agreed_exit_code": None, "error": "", "collateral": False},
            **{"fault_class": "hang", "doubt": None, "failed": [3], "finding": "behind", "blamed": [3], "waiting": 7},
            **{"error_text": "", "before_group": False, "exceeded": ""},
        )
    )
    journal.write(events.DecisionEvent(cycle, "restart", "restart", True, 3, None, 0.0, False))
    journal.write(events.CycleEndEvent(cycle, "failed"))


def read(status: NodeStatus, ranks: int, step: int) -> None:
    """All ranks are at a step; a few are late."""
    now = time.monotonic()
    status.read(
        [
            RankReading(rank, rank, 9999 + rank, now, True, True, step - 3 * (rank % 100 == 7), {"step": 0.7}, 0.2)
            for rank in range(ranks)
        ]
    )


def serve(ranks: int, folder: Path, journal: Journal) -> None:
    """Answers until the standard input ends."""
    port = free_port()
    steps = itertools.count(10_000)
    step = next(steps)
    before = memory_mib()
    settings = Settings(record=RecordSettings(status_port=port))
    with answering(settings, {}, folder, journal, lambda: times(step), "1") as (status, _):
        journal.write(events.JobStartEvent("simulated", "host", ["train.py"], 30, ranks, {}))
        for cycle in range(FAULTS):
            fail(journal, cycle, ranks)
        journal.write(events.CycleStartEvent(FAULTS, 0, 1, "host:1", []))
        read(status, ranks, step)
        print(json.dumps({"port": port, "memory_mib": before}), flush=True)
        while True:
            read(status, ranks, step)
            step = next(steps)
            if select.select([sys.stdin], [], [], STEP_S)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps({"memory_mib": memory_mib()}), flush=True)


def main() -> None:
    """Has hangs in the journal, as a launcher has that nobody asks, and then serves."""
    ranks, journal = int(sys.argv[1]), Journal()
    with tempfile.TemporaryDirectory() as folder:
        journal.open(Path(folder) / "journal.jsonl")
        # A line has 2 MB with 1,024 ranks. From the second one on the memory of a launcher that nobody asks is 4 MiB
        # larger, and stays.
        for cycle in range(2):
            fail(journal, cycle, ranks)
        serve(ranks, Path(folder), journal)


if __name__ == "__main__":
    main()
