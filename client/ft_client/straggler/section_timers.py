"""Timers of sections. They run inside the training's step, so an entry that is not timed must cost next to nothing.

`Detector.detection_section` gives the script a `SectionTimer` as a context manager. A section is entered by one thread,
the training's. This file knows the kernels only as something to start and stop, and knows no rank and no report.
"""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType

from ft_client.straggler.kernels import Kernels
from ft_client.straggler.samples import Samples, Summary, summaries


class SectionTimer:
    """A section of this process: one context manager for all its entries.

    Args:
        name: the section's name, in reports.
        every: one in so many entries is timed: `profiling_interval`.
        kernels: the recorder of CUDA kernels, which is started around each timed entry.

    Attributes:
        profile_cuda: whether kernels are recorded as well.
        is_open: whether its body runs.
        samples: how long the timed entries took, in ms.
    """

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
        """Opens the section.

        Raises:
            RuntimeError: the section is open already. A section inside another one needs another name.
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
        """Closes the section. An entry that raised is not recorded: it shows how long the fault took, not the work.

        Where kernels were recorded, this waits for the GPU, after the time was taken.
        """
        self.is_open = False
        if self._started_ns:
            took_ns = perf_counter_ns() - self._started_ns
            self._started_ns = 0
            if self._profiling:
                self._kernels.stop(keep=kind is None)
            if kind is None:
                self.samples.add(took_ns / 1e6)


class SectionTimers(dict[str, SectionTimer]):
    """The sections of this process by name. A section is made when its name is used for the first time.

    Args:
        every: one in so many entries of a section is timed.
        kernels: the recorder of CUDA kernels.
    """

    def __init__(self, every: int, kernels: Kernels) -> None:
        super().__init__()
        self._every = every
        self._kernels = kernels

    def __missing__(self, name: str) -> SectionTimer:
        """Makes and returns the section of a name that is used for the first time.

        Raises:
            ValueError: the name is no text, or empty.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: the name of a section must be a text that is not empty")
        self[name] = section = SectionTimer(name, self._every, self._kernels)
        return section

    def drain(self) -> dict[str, Summary]:
        """Returns the summary (ms) of each section timed since the last call, and removes the samples."""
        return summaries({name: section.samples for name, section in list(self.items())})
