"""The runner: `python -m scripts.bench [P1 P2 ...] [--peers torchrun,nvrx,lm-resiliency] [--repeat N] [--json FILE]`.

All launchers take turns within each round, so that the noise of the machine hits them alike. Asserts no time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .job import JobFailed
from .launchers import (
    LM_RESILIENCY,
    NVRX,
    OURS,
    TORCHRUN,
    Launcher,
    make_lm_resiliency_environment,
    make_nvrx_environment,
)
from .scenario import Outcome, Scenario
from .scenarios import SCENARIOS
from .table import FLOOR, record, render

PEERS = {"torchrun": TORCHRUN, "nvrx": NVRX, "lm-resiliency": LM_RESILIENCY}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    known = [key for scenario in SCENARIOS for key in scenario.keys]
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {' '.join(known)}; default: all")
    parser.add_argument("--peers", default="torchrun", help=f"comma-separated: {', '.join(PEERS)} (default: torchrun)")
    parser.add_argument("--no-ours", action="store_true", help="measure the peers alone")
    parser.add_argument("--repeat", type=int, default=5, help="values per cell, at least (default: 5)")
    parser.add_argument("--ranks", default="", help="comma-separated: only these numbers of ranks")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    options = parser.parse_args(arguments)
    for name in set(options.scenarios) - set(known):
        parser.error(f"no scenario {name}; there are {' '.join(known)}")
    for name in set(options.peers.split(",")) - set(PEERS):
        parser.error(f"no peer {name!r}; there are {' '.join(PEERS)}")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: give a number of at least 1")
    return options


def run(
    scenario: Scenario, launchers: list[Launcher], repeat: int, ranks_wanted: set[int]
) -> dict[tuple[int, str], Outcome]:
    """All rounds of one scenario; each round begins with another launcher."""
    taking_part = [variant for launcher in launchers for variant in scenario.variants.get(launcher.name, ())]
    sizes = [ranks for ranks in scenario.sizes if not ranks_wanted or ranks in ranks_wanted]
    names = [FLOOR, *(launcher.name for launcher in taking_part)]
    results = {(ranks, name): Outcome() for ranks in sizes for name in names}
    for _ in range(math.ceil(repeat / scenario.trials)):
        for ranks in sizes:
            results[ranks, FLOOR].tried += 1
            scenario.floor(ranks, results[ranks, FLOOR])
            for launcher in taking_part:
                measure(scenario, launcher, ranks, results[ranks, launcher.name])
        taking_part = taking_part[1:] + taking_part[:1]
    return results


def measure(scenario: Scenario, launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One run; what goes wrong is a result too."""
    outcome.tried += scenario.trials
    start = time.monotonic()
    try:
        scenario.once(launcher, ranks, outcome)
    except (JobFailed, subprocess.TimeoutExpired) as error:
        outcome.failures.append(str(error))
    latest = {metric: f"{values[-1]:.4g}" for metric, values in outcome.values.items()}
    took = time.monotonic() - start
    print(f"{scenario.keys[0]} {launcher.name} {ranks} ranks, {took:.1f} s: {latest}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": os.getloadavg(),
    }


def main() -> int:
    """Run what was asked for; 0 when each launcher gave at least one value everywhere."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    peers = list(dict.fromkeys(["torchrun", *options.peers.split(",")]))
    if "nvrx" in peers:
        make_nvrx_environment()
    if "lm-resiliency" in peers:
        try:
            make_lm_resiliency_environment()
        except subprocess.CalledProcessError as error:
            print(f"lm-resiliency is left out, as it cannot be installed: {error}", file=sys.stderr)
            peers.remove("lm-resiliency")
    launchers = [PEERS[name] for name in peers]
    if not options.no_ours:
        launchers.insert(0, OURS)
    wanted = [s for s in SCENARIOS if not options.scenarios or set(s.keys) & set(options.scenarios)]
    whole: dict[str, Any] = {"machine": machine(), "repeat": options.repeat, "scenarios": []}
    tables, silent = [], False
    for scenario in wanted:
        results = run(scenario, launchers, options.repeat, {int(text) for text in options.ranks.split(",") if text})
        tables.append(render(scenario, results))
        silent |= any(not outcome.values and outcome.tried for outcome in results.values() if outcome.failures)
        whole["scenarios"].append(record(scenario, results))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(whole, indent=1) + "\n")
    print("\n\n".join(tables))
    return int(silent)


if __name__ == "__main__":
    sys.exit(main())
