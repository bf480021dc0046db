"""Injects a fault by `simulate_fault` in the first cycle, and waits for the fault of the variable in the second."""

from __future__ import annotations

import os
import time

from ft_client.inject import SimulatedFaultParams, simulate_fault

if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        simulate_fault(SimulatedFaultParams("rank_killed", 0.0, rank_to_fail=0))
    time.sleep(600)
