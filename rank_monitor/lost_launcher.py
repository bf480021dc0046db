"""Ends all processes of a monitor's job, or of one cycle, and removes its runtime folder, when the launcher was killed.

Each monitor, the template and the sweeper call `MonitoredJob.end` when the launcher is gone without a goodbye. All of
them do the same, and none waits for another: one survivor is enough. A monitor calls `end_cycle` when the node's lease
has run out.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract import env
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.processes.sweep import kill, processes_of, sweep
from rank_monitor.log import Log

_SWEEP_S = 10.0
"""How long processes that were killed are waited for. Only a process that waits in the kernel outlives SIGKILL, and
nothing here can end that sooner."""


@dataclass(frozen=True)
class MonitoredJob:
    """The job of a monitor, as far as a monitor can end it.

    Attributes:
        tag: the value of FT_JOB_TAG in the environment of the job's processes; others are never touched.
        runtime_dir: the runtime folder of the launcher.
    """

    tag: str
    runtime_dir: str

    def end_cycle(self, cycle: int, log: Log) -> None:
        """Kills the ranks of a cycle on this machine and every process they started. Blocks for up to 10 s.

        The launcher lives on, so its own processes and its runtime folder are left alone.
        """
        self._sweep(log, {env.CYCLE: str(cycle)})

    def end(self, log: Log) -> None:
        """Kills every process of the job on this machine and removes its runtime folder. Blocks for up to 10 s.

        The other monitors see the same end and exit by themselves. A monitor that was stopped is continued, so that it
        does not stay for ever. The training's state in memory stays for its time (`memory_linger.py`).
        """
        in_memory = runtime_folder.state_in_memory(Path(self.runtime_dir))
        self._sweep(log)
        # Before the runtime folder goes, by which the other survivors find the state: this process may be killed, too.
        if in_memory is not None:
            self._give_time(in_memory)
        runtime_folder.remove(Path(self.runtime_dir))
        for pid in processes_of(self.tag, key=env.SIDECAR_OF):
            kill(pid, self.tag, signal.SIGCONT, key=env.SIDECAR_OF)

    def _give_time(self, in_memory: Path) -> None:
        """Leaves the training's state in memory for its time. Its folder stays where that fails."""
        # The package may be on a file server that is gone with the launcher, or was replaced by another release.
        with suppress(ImportError, OSError):
            # Imported here: a monitor needs it only when its launcher was killed, and would pay for it in memory.
            from rank_monitor.memory_linger import after_death

            after_death(in_memory, self.tag)

    def _sweep(self, log: Log, also: Mapping[str, str] | None = None) -> None:
        left = sweep(self.tag, _SWEEP_S, also)
        if left:
            log.warning(f"Not ended {_SWEEP_S:g} s after SIGKILL: {left}")
