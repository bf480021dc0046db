"""Entry point of the template, and of a monitor that is started without one.

`contract/processes/spawn.py` passes a JSON object as the last argument; its keys say which of the two to run.
"""

from __future__ import annotations

import json
import socket
import sys

from rank_monitor.contract.processes import proc
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import from_json
from rank_monitor.log import Log
from rank_monitor.lost_launcher import MonitoredJob
from rank_monitor.server import RankMonitorServer
from rank_monitor.template import TemplateProcess, ignore_signals


def main() -> None:
    """Runs the template or the monitor that the last argument describes."""
    order = json.loads(sys.argv[-1])
    job = MonitoredJob(order["tag"], order["runtime_dir"])
    ignore_signals()
    if "launcher" in order:
        proc.name_this_process("ft_template")
        TemplateProcess(order["launcher"], job, order.get("sweeper")).run()
    else:
        settings = from_json(MonitorSettings, order["settings"], "the launcher")
        proc.name_this_process(f"ft_monitor{order['local_rank']}")
        listener, agent = socket.socket(fileno=order["listener"]), socket.socket(fileno=order["agent"])
        log, lease = Log(""), order.get("lease")
        RankMonitorServer(listener, agent, settings, order["local_rank"], job, log, lease).run()


if __name__ == "__main__":
    main()
