"""In-process restart as Megatron Bridge configures it: plain numbers, in seconds. What they mean stands elsewhere."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ft_client.inprocess.rank_assignment import at_least
from ft_client.inprocess.timeouts import Timeouts

if TYPE_CHECKING:
    from ft_client.inprocess.wrapper import Wrapper

GRANULARITIES = ("node", "rank")


@dataclass(kw_only=True)
class InProcessRestartConfig:
    """Options of in-process restart. Durations are seconds. Can be changed until it is used, as Bridge's own can.

    `active_world_size`: ranks that call the function, None: all. `granularity`: what is given up with a rank, itself
    or its node. `max_iterations`: None: no limit. `empty_cuda_cache`: after a fault. `max_rank_faults`: faults of one
    rank before it ends, None: no limit. `monitor_process_logdir`: folder for the log of rank 0's monitor process.
    """

    enabled: bool = False
    active_world_size: int | None = None
    granularity: str = "node"
    max_iterations: int | None = None
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_interval: float = 30.0
    heartbeat_timeout: float = 60.0
    monitor_thread_interval: float = 1.0
    monitor_process_interval: float = 1.0
    progress_watchdog_interval: float = 1.0
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    last_call_wait: float = 1.0
    termination_grace_time: float = field(default=1.0)
    empty_cuda_cache: bool = True
    max_rank_faults: int | None = None
    monitor_process_logdir: str | None = None

    def wrapper(self, environment: Mapping[str, str] | None = None, **more: Any) -> Wrapper:
        """The wrapper that these options describe.

        Args:
            environment: of the rank; None: of this process.
            **more: further arguments of `Wrapper`. A callback is called before that of the options.

        Raises:
            TypeError, ValueError: an option or argument cannot be; or, when enabled, RANK or WORLD_SIZE is missing.
        """
        from ft_client.inprocess.configured_wrapper import configured_wrapper

        return configured_wrapper(self, os.environ if environment is None else environment, more)

    def timeouts(self) -> Timeouts:
        """The durations, checked against each other; all other options are checked, too.

        Raises:
            TypeError: an option has the wrong type; the text names it.
            ValueError: an option has no possible value, or a relation between two is violated.
        """
        for name in ("enabled", "empty_cuda_cache"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a bool")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity={self.granularity!r} is neither 'node' nor 'rank'")
        for name, least in (("active_world_size", 1), ("max_iterations", 1), ("max_rank_faults", 0)):
            at_least(least, name, getattr(self, name))
        if self.monitor_process_logdir is not None and not isinstance(self.monitor_process_logdir, str):
            raise TypeError(f"monitor_process_logdir={self.monitor_process_logdir!r} is not a text")
        durations = {one.name for one in fields(Timeouts)}
        return Timeouts(**{name: _duration(name, value) for name, value in asdict(self).items() if name in durations})


def logfile_name(environment: Mapping[str, str], hostname: str) -> str:
    """The name of the log in `monitor_process_logdir`; what Slurm does not say reads `none`."""
    job, process, local = (environment.get(f"SLURM_{name}", "none") for name in ("JOB_ID", "PROCID", "LOCALID"))
    return f"monitor_{job}_{hostname}_{process}_{local}.log"


def _duration(name: str, value: object) -> datetime.timedelta:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a number of seconds")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite")
    return datetime.timedelta(seconds=value)
