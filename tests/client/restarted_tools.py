"""What the ranks of `test_restarted_tools.py` run: a training with every tool in it, restarted in process."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import signal
from collections.abc import Callable
from typing import Any

from torch import distributed

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.wrapper import Wrapper
from ft_client.preemption import DistributedSignalHandler
from ft_client.rerun import RerunDataIterator, RerunStateMachineConfig
from ft_client.straggler import CallableId, Detector, Statistic
from tests.client.inprocess.job import QUICK
from tests.groups import end_groups

STEPS = 3
IN_A_SECTION, BEFORE_A_REPORT = 0, 1
"""The iterations in which rank 1 fails, and where: the others wait for it in a vote, and in a report's all-reduce."""


class Model:
    """Has a callable to be wrapped."""

    def forward(self, x: int) -> int:
        return x


def main(note: Callable[[Any], None]) -> list[Any]:
    """What the last call of the function found, and whether all is as it was before."""
    before, forward = signal.getsignal(signal.SIGUSR2), vars(Model)["forward"]
    with DistributedSignalHandler(signal.SIGUSR1) as outer:
        found = Wrapper(**QUICK)(train)(outer)
    Detector.shutdown()
    return [found, signal.getsignal(signal.SIGUSR2) is before, vars(Model)["forward"] is forward]


def train(outer: DistributedSignalHandler, call: CallWrapper) -> dict[str, Any]:
    """Three steps, a result that a rerun does not reproduce, and a report.

    Args:
        outer: outlives a restart; rank 1 gets its signal right before the first fault.
    """
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = distributed.get_rank()
    Detector.initialize(node_name=f"turn{call.iteration}")
    Detector.wrap_callables([CallableId(Model, "forward")])
    machine = RerunStateMachineConfig("validate_results").initialize()
    data, seen, model = RerunDataIterator(itertools.count()), [], Model()
    with DistributedSignalHandler(signal.SIGUSR2) as handler:
        for step in range(STEPS):
            runs = itertools.count()
            while machine.should_run_forward_backward(data):
                with Detector.detection_section("work"):
                    seen.append(model.forward(next(data)))
                    if (call.iteration, step, rank) == (IN_A_SECTION, 1, 1):
                        os.kill(os.getpid(), signal.SIGUSR1)
                        raise ValueError("in a section")
                wrong = (step, rank, next(runs)) == (2, 1, 0)
                machine.validate_result(math.nan if wrong else 1.0, math.isnan, "loss is NaN")
            assert not handler.should_stop()
        if (call.iteration, rank) == (BEFORE_A_REPORT, 1):
            raise ValueError("before a report")
        report = Detector.generate_report()
    diagnostic, stops = machine.diagnostic, outer.should_stop()
    distributed.barrier()
    end_groups()
    told = {"iteration": call.iteration, "seen": seen, "diagnostic": diagnostic and diagnostic.value, "told": stops}
    if report is not None:
        told |= {
            "entries": {name: one[Statistic.NUM] for name, one in report.local_section_summaries.items()},
            "scored": {name: sorted(ranks) for name, ranks in report.section_relative_perf_scores.items()},
            "nodes": dict(report.rank_to_node),
        }
    return told
