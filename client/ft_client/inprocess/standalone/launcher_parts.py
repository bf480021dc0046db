"""The parts of the launcher that run in processes of the client: the standalone agent, and the monitor of one rank.

`rank_calls.py` and the server of the NVIDIA alias use them. Nothing else in the client imports the launcher. Each name
is imported when it is first used, which is in a process that was made for it. So no rank loads the launcher, which
would cost memory and start-up time in every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_launcher.agent.standalone import StandaloneAgent, StandaloneCall
    from ft_launcher.node.monitors.single_monitor import SingleMonitor
    from ft_launcher.node.ranks.runtime import Runtime

__all__ = ["Runtime", "SingleMonitor", "StandaloneAgent", "StandaloneCall"]

# Name -> the module that has it. The list above is for type checkers, which do not follow `__getattr__`.
_HOMES = {
    "Runtime": "ft_launcher.node.ranks.runtime",
    "SingleMonitor": "ft_launcher.node.monitors.single_monitor",
    "StandaloneAgent": "ft_launcher.agent.standalone",
    "StandaloneCall": "ft_launcher.agent.standalone",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
