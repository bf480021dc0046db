"""A training with heartbeats, written against the API of `nvidia_resiliency_ext` 0.1 and 0.2, as their examples use it.

Reads a state in the form of those releases, shows the limits before and after it learned its own, and saves the state.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import fault_tolerance

STEPS = 4
STATE = Path("ft_state.json")


def main() -> None:
    dist.init_process_group("gloo")
    rank, shown = dist.get_rank(), []
    config = fault_tolerance.FaultToleranceConfig(log_level=logging.DEBUG)
    assert config.log_level == logging.DEBUG
    client: Any = fault_tolerance.RankMonitorClient()
    assert client.timeouts is None
    client.init_workload_monitoring(get_state_dict_cb=dict)
    assert not client.timeouts.are_valid, "none are configured"
    assert not client.get_checkpoint_from_rmon()
    client.load_state_dict(json.loads(STATE.read_text()))
    shown.append([client.timeouts.initial, client.timeouts.subsequent, client.timeouts.were_calculated])
    dist.barrier()
    weight = torch.zeros(1)
    for _ in range(STEPS):
        dist.all_reduce(weight)
        with client.get_parameters_update_section():
            weight += 1
        client.send_heartbeat()
    client.calculate_and_set_timeouts()
    shown.append([client.timeouts.initial, client.timeouts.subsequent, client.timeouts.were_calculated])
    Path(f"shown-{rank}").write_text(json.dumps(shown))
    if rank == 0:
        STATE.write_text(json.dumps(client.state_dict()))
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
