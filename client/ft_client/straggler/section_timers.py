"""Timers of sections. They run inside the training's step, so an entry that is not timed must cost next to nothing.

Knows its kernels only as something to start and stop; no rank, no report.
"""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType

from ft_client.straggler.kernels import Kernels
from ft_client.straggler.samples import Samples, Summary, summaries


class SectionTimer:
    """A section of this process: one context manager for all its entries, every `every`-th of which is timed."""

    __slots__ = (
        "_every",
        "_kernels",
        "_left",
        "_profiling",
        "_started_ns",
        "is_open",
        "name",
        "profile_cuda",
        "samples",
    )

    def __init__(self, name: str, every: int, kernels: Kernels) -> None:
        self.name = name
        self.profile_cuda = True
        self.is_open = False
        self.samples = Samples()
        self._every = every
        self._left = every
        self._kernels = kernels
        self._started_ns = 0
        self._profiling = False

    def __enter__(self) -> None:
        """Opens it.

        Raises:
            RuntimeError: it is open already.
        """
        if self.is_open:
            raise RuntimeError(f"name={self.name!r}: the section is open already; a section inside needs another name")
        self.is_open = True
        self._left -= 1
        if not self._left:
            self._left = self._every
            self._profiling = self.profile_cuda and self._kernels.start()
            self._started_ns = perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes it; an entry that raised is not recorded."""
        self.is_open = False
        if self._started_ns:
            took_ns = perf_counter_ns() - self._started_ns
            self._started_ns = 0
            if self._profiling:
                self._kernels.stop(keep=kind is None)
            if kind is None:
                self.samples.add(took_ns / 1e6)


class SectionTimers(dict[str, SectionTimer]):
    """The sections of this process by name, made when first named.

    Args:
        every: which entries are timed.
        kernels: what runs on the GPU meanwhile.
    """

    def __init__(self, every: int, kernels: Kernels) -> None:
        super().__init__()
        self._every = every
        self._kernels = kernels

    def __missing__(self, name: str) -> SectionTimer:
        """Makes and returns the section of a name that is used for the first time.

        Raises:
            ValueError: that is not a name.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: the name of a section must be a text that is not empty")
        self[name] = section = SectionTimer(name, self._every, self._kernels)
        return section

    def taken(self) -> dict[str, Summary]:
        """Returns the summary (ms) of each section timed since the last call, and removes the samples."""
        return summaries({name: section.samples for name, section in list(self.items())})
