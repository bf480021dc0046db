"""A rank under learned limits: it loads what the job before learned, trains, learns, and leaves that to the next one.

Plain Python, alone in its job: limits that ranks agree on are tested where there is a group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ft_client as ft

STATE_FILE = "ft_state.json"
_ORDER = "order.json"
_WARMUP = 1


@dataclass(frozen=True)
class Order:
    """What the rank does. `kind`: heartbeats or sections. `learns`: at the end.

    `first_s`: how long its first step takes. `hang_at`: the step that never ends, once in a job. `new_section`: one
    more that it opens in each step.
    """

    kind: str = "sections"
    learns: bool = True
    steps: int = 6
    step_s: float = 0.05
    first_s: float = 0.0
    hang_at: int | None = None
    new_section: str = ""

    def save(self, folder: Path) -> None:
        (folder / _ORDER).write_text(json.dumps(dataclasses.asdict(self)))


class Rank:
    """One rank in one cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cycle = folder, os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.order = Order(**json.loads((folder / _ORDER).read_text()))
        self.client = ft.RankMonitorClient()

    def run(self) -> None:
        self.client.init_workload_monitoring(num_warmup_iters=_WARMUP)
        state = self.folder / STATE_FILE
        if state.exists():
            self.client.load_state_dict(json.loads(state.read_text()))
        self._note_limits()
        with self._part("setup"):
            time.sleep(self.order.step_s)
        for step in range(self.order.steps):
            self.client.report_iteration(step)
            self._train(step)
            with self._part("checkpointing"):
                pass
        self._evaluate()
        if self.order.learns:
            state.write_text(json.dumps(self._learned()))
        self.client.shutdown_workload_monitoring()

    def _train(self, step: int) -> None:
        with self._part("step"):
            time.sleep(self.order.step_s if step else self.order.first_s)
            if step == self.order.hang_at and not (self.folder / "injected").exists():
                (self.folder / "injected").touch()
                time.sleep(600)
        if self.order.new_section:
            with self._part(self.order.new_section):
                pass

    def _evaluate(self) -> None:
        """The first evaluation step is slow as the first training step is, and stands in no section."""
        for step in range(_WARMUP + 1):
            if step < _WARMUP:
                time.sleep(self.order.step_s)
            else:
                with self._part("step"):
                    time.sleep(self.order.step_s)

    def _part(self, name: str) -> Any:
        if self.order.kind == "sections":
            return self.client.section(name)
        self.client.send_heartbeat()
        return contextlib.nullcontext()

    def _learned(self) -> dict[str, Any]:
        if self.order.kind == "sections":
            assert self.client.calculate_and_set_section_timeouts(selected_sections=None, calc_out_of_section=True)
        else:
            assert self.client.calculate_and_set_hb_timeouts()
        return self.client.state_dict()

    def _note_limits(self) -> None:
        """What is in force at the start of this cycle."""
        assert self.client.hb_timeouts and self.client.section_timeouts
        limits = {"subsequent": self.client.hb_timeouts.subsequent, "section": self.client.section_timeouts.section}
        (self.folder / f"limits-{self.cycle}").write_text(json.dumps(limits))


if __name__ == "__main__":
    Rank(Path(sys.argv[1])).run()
