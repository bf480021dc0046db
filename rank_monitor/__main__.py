"""Entry of the template, and of a monitor that is started by itself: a JSON object says which, and what it gets."""

from __future__ import annotations

import json
import socket
import sys

from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.settings import from_json
from rank_monitor.job import Job
from rank_monitor.log import Log
from rank_monitor.server import RankMonitorServer
from rank_monitor.template import Template, ignore_signals, name_process


def main() -> None:
    """Runs what the last argument asks for."""
    order = json.loads(sys.argv[-1])
    job = Job(order["tag"], order["runtime_dir"])
    ignore_signals()
    if "launcher" in order:
        name_process("ft_template")
        Template(order["launcher"], job, order.get("sweeper")).run()
    else:
        settings = from_json(MonitorSettings, order["settings"], "the launcher")
        name_process(f"ft_monitor{order['local_rank']}")
        listener, agent = socket.socket(fileno=order["listener"]), socket.socket(fileno=order["agent"])
        log, lease = Log("INFO", ""), order.get("lease")
        RankMonitorServer(listener, agent, settings, order["local_rank"], job, log, lease).run()


if __name__ == "__main__":
    main()
