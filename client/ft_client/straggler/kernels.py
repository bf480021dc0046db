"""Measures how long the CUDA kernels of timed sections ran, by torch's profiler. Knows no section and no rank.

Without CUDA there is nothing to record. Kernels of all sections are counted together; those of NCCL, which mostly wait
for other ranks, are not counted, nor are copies. An error of the profiler never stops the training: it is logged once.
Asks torch, by an underscored name, whether a profile of the user runs: one begun inside another would end both.
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

# Names of kernels can be without end (a JIT compiler makes them); each has up to 64 KiB of samples.
MAX_KERNELS = 512
_SILENT = "6"  # above the level of the lines that Kineto writes for each recording
_TROUBLE = (RuntimeError, AssertionError)  # what the profiler raises
# Kernels of NCCL mostly wait for other ranks; copies are no computation.
_NOT_COUNTED = ("nccl", "Memcpy", "Memset")


class Kernels:
    """The kernels of this process: `start` and `stop` around what counts; at most `MAX_KERNELS` names are kept."""

    def __init__(self) -> None:
        self._usable = torch.cuda.is_available()
        self._profile: Any = None
        self._samples: dict[str, Samples] = {}
        self._warned_full = False
        if self._usable:  # else the profiler's library writes two lines to stderr each time
            os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)

    def start(self) -> bool:
        """Starts to record; returns whether it did: not without CUDA, nor inside another recording or profile."""
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
        """Ends the recording; waits for the GPU.

        Args:
            keep: add the kernels to the samples.
        """
        recording = self._profile
        self._profile = None
        if recording is None:  # ended by a shutdown inside the section
            return
        try:
            recording.stop()
            if keep:
                self.take(recording.events())
        except _TROUBLE as problem:
            self._give_up(problem)

    def take(self, events: Iterable[FunctionEvent]) -> None:
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

    def taken(self) -> dict[str, Summary]:
        """Returns the summary (us) of each kernel since the last call, and removes samples and names."""
        samples = self._samples
        self._samples = {}
        return summaries(samples)

    def _warn_full(self, name: str) -> None:
        if not self._warned_full:
            self._warned_full = True
            logger.warning("more than %d kinds of kernels: %.80s and further ones are not counted", MAX_KERNELS, name)

    def _give_up(self, problem: Exception) -> None:
        self._usable = False
        logger.warning("kernels are not timed from now on: torch's profiler says: %s", problem)
