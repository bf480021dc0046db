"""Measures how long the CUDA kernels of timed sections ran, by torch's profiler. Knows no section and no rank.

`section_timers.py` starts and stops a recording around each timed entry; `detector.py` drains the durations at each
report. Without CUDA there is nothing to record.

The kernels of all sections are counted together, by name. Two kinds are left out: kernels of NCCL, which mostly wait
for other ranks, and copies. So what is compared is the speed of this GPU, and not of the GPU for which it waits.

An error of the profiler never stops the training: it is logged once, and no kernel is timed from then on. This file
asks torch, by an underscored name, whether a profile of the user runs: a profile begun inside another would end both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ft_client.straggler.samples import Samples, Summary, summaries

logger = logging.getLogger(__name__)

MAX_KERNELS = 512
"""Names of kernels that are kept between two reports. A JIT compiler makes names without end, and each has up to 64 KiB
of samples."""
_SILENT = "6"
"""A log level of Kineto, torch's profiling library, above that of the lines that it writes for each recording."""
_TROUBLE = (RuntimeError, AssertionError)
"""What the profiler raises."""
_NOT_COUNTED = ("nccl", "Memcpy", "Memset")
"""How the names begin of what is no computation of this GPU."""


class Kernels:
    """The kernels of this process. `start` and `stop` are called around what counts, in the training's thread."""

    def __init__(self) -> None:
        self._usable = torch.cuda.is_available()
        self._profile: Any = None
        self._samples: dict[str, Samples] = {}
        self._warned_full = False
        if self._usable:  # without this variable Kineto writes two lines to stderr for each recording
            os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)

    def start(self) -> bool:
        """Starts a recording. Returns whether it did: not without CUDA, nor inside another recording or profile."""
        if not self._usable or self._profile is not None or profiler._is_profiler_enabled:
            return False
        try:
            recording = profile(activities=[ProfilerActivity.CUDA])
            recording.start()
        except _TROUBLE as problem:
            self._give_up(problem)
            return False
        self._profile = recording
        return True

    def stop(self, keep: bool) -> None:
        """Ends the recording. Blocks until the GPU has done what was asked of it so far.

        Args:
            keep: whether to add the kernels to the samples.
        """
        recording = self._profile
        self._profile = None
        if recording is None:  # a shutdown inside the section has ended it
            return
        try:
            recording.stop()
            if keep:
                self.record(recording.events())
        except _TROUBLE as problem:
            self._give_up(problem)

    def record(self, events: Iterable[FunctionEvent]) -> None:
        """Adds the durations (us) of all events that are kernels of computation."""
        for event in events:
            if event.device_type.name != "CUDA" or event.is_user_annotation or event.name.startswith(_NOT_COUNTED):
                continue
            samples = self._samples.get(event.name)
            if samples is None:
                if len(self._samples) >= MAX_KERNELS:
                    self._warn_full(event.name)
                    continue
                samples = self._samples[event.name] = Samples()
            samples.add(event.time_range.elapsed_us())

    def drain(self) -> dict[str, Summary]:
        """Returns the summary (us) of each kernel since the last call, and removes samples and names."""
        samples = self._samples
        self._samples = {}
        return summaries(samples)

    def _warn_full(self, name: str) -> None:
        """Logs, once in a process, that further kinds of kernels are not counted."""
        if not self._warned_full:
            self._warned_full = True
            logger.warning("more than %d kinds of kernels: %.80s and further ones are not counted", MAX_KERNELS, name)

    def _give_up(self, problem: Exception) -> None:
        """Logs an error of the profiler, and records nothing from now on."""
        self._usable = False
        logger.warning("kernels are not timed from now on: torch's profiler says: %s", problem)
