"""In-process restart: a function that is called again, in the same processes, after a fault on any rank.

    import datetime
    from ft_client.inprocess import Wrapper

    @Wrapper(soft_timeout=datetime.timedelta(seconds=60), hard_timeout=datetime.timedelta(seconds=90))
    def train() -> None:
        torch.distributed.init_process_group("nccl")
        ...

    train()

Every public name is here, or in a public module of this package. A name is loaded when it is used: importing this
package loads none of its modules, and no torch. The names are those of NVIDIA's `inprocess` package.
docs/in_process.md is the user's guide. `restart/machine.py` explains how a restart goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.inprocess import abort as abort
    from ft_client.inprocess import attribution as attribution
    from ft_client.inprocess import completion as completion
    from ft_client.inprocess import compose as compose
    from ft_client.inprocess import exception as exception
    from ft_client.inprocess import finalize as finalize
    from ft_client.inprocess import health_check as health_check
    from ft_client.inprocess import initialize as initialize
    from ft_client.inprocess import nested_restarter as nested_restarter
    from ft_client.inprocess import rank_assignment as rank_assignment
    from ft_client.inprocess import rank_filter as rank_filter
    from ft_client.inprocess import state as state
    from ft_client.inprocess import store as store
    from ft_client.inprocess import terminate as terminate
    from ft_client.inprocess.call_wrapper import CallWrapper as CallWrapper
    from ft_client.inprocess.compose import Compose as Compose
    from ft_client.inprocess.restart_config import InProcessRestartConfig as InProcessRestartConfig
    from ft_client.inprocess.state import FrozenState as FrozenState
    from ft_client.inprocess.state import Mode as Mode
    from ft_client.inprocess.state import State as State
    from ft_client.inprocess.wrapper import Wrapper as Wrapper

_HOMES = {
    "CallWrapper": ".call_wrapper",
    "Compose": ".compose",
    "FrozenState": ".state",
    "InProcessRestartConfig": ".restart_config",
    "Mode": ".state",
    "State": ".state",
    "Wrapper": ".wrapper",
}
"""Class -> the module it lives in."""

_MODULES = (
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
)
"""Modules that are public names themselves."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _MODULES)
