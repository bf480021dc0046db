"""What the process of a standalone agent gets from the rank that starts it.

A rank without a launcher starts such a process (`ft_client.inprocess.standalone`), in which the launcher's agent of one
rank runs (`ft_launcher.agent.standalone`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AgentOrder:
    """The parameters of a standalone agent: its rank, the runtime folder, and open descriptors.

    `tag` marks the template and the monitor, and no rank, so that nothing is killed when the agent is lost. `reconnect`
    says that the rank had another agent before, whose monitor it knows. `rank` is the rank's pidfd, `connection` the
    one to it, `listener` where it connects to its monitor, `log` the log file, or the null device.
    """

    tag: str
    member: int
    local_rank: int
    rank_pid: int
    started_ns: int
    reconnect: bool
    folder: str
    rank: int
    connection: int
    listener: int
    log: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the agent keeps."""
        return self.rank, self.connection, self.listener, self.log
