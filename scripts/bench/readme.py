"""Writes the README's table from a record of the runner: `python -m scripts.bench.readme RECORD.json`.

The table stands between two marks in README.md; each figure is a median of the record, and the command is named.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
LAUNCHERS = ("floor", "torchrun", "torchrun-opt", "nvrx", "ours")
HEADS = ("floor", "torchrun", "torchrun, store opt-out", "NVIDIA 0.4.1", "ft_launcher")
ROWS = (
    ("P1", "launch_s", "launch to the last process group ready", "s"),
    ("P1b", "exit_s", "last rank's end to the launcher's end", "s"),
    ("P2", "recover_s", "a rank's SIGKILL to all process groups ready", "s"),
    ("P2b", "step_s", "a rank's SIGKILL to the first step of a DDP model on all ranks", "s"),
    ("P5", "heartbeat_dead_ms", "hang: the rank dead, after the limit", "ms"),
    ("P6", "heartbeat_p50_us", "`send_heartbeat`, p50", "us"),
    ("P6", "section_p50_us", "`start_section` + `end_section`, p50", "us"),
    ("P7", "monitor_private_MiB", "private memory of a monitor", "MiB"),
    ("P7", "all_pss_MiB", "launcher and monitors, PSS", "MiB"),
    ("P8", "restart_ms", "in process, `last_call_wait` 0: an exception to the function called again on all", "ms"),
    ("P8", "gloo_ready_ms", "the same to a new gloo group ready on all", "ms"),
    ("P8", "ddp_step_ms", "the same to the first step of a DDP model on all", "ms"),
    ("P8", "default_restart_ms", "the same without a group, with default settings", "ms"),
    ("P9", "entry_s", "in process: the call to the function begun on all", "s"),
    ("P9", "requests_per_s_a_rank", "requests to the store per second and rank while nothing happens", ""),
    ("P10", "stop_over_s", "a rank ignores SIGTERM: stop beyond the limit", "s"),
)


def table(found: dict[str, Any]) -> str:
    """The Markdown table of a record."""
    lines = [
        "| what (median) | ranks | " + " | ".join(HEADS) + " |",
        "|---|---|" + "---|" * len(HEADS),
    ]
    for key, metric, words, unit in ROWS:
        for scenario in (scenario for scenario in found["scenarios"] if key in scenario["keys"]):
            sizes = dict.fromkeys(row["ranks"] for row in scenario["results"])
            for ranks in sizes:
                cells = [cell(scenario, ranks, launcher, metric, unit) for launcher in LAUNCHERS]
                if cells[-1] != "-":
                    lines.append(f"| {words} | {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(scenario: dict[str, Any], ranks: int, launcher: str, metric: str, unit: str) -> str:
    """The median with its unit, and how many tries failed."""
    rows = [row for row in scenario["results"] if (row["ranks"], row["launcher"]) == (ranks, launcher)]
    if not rows or (metric not in rows[0]["metrics"] and not rows[0]["failures"]):
        return "-"
    values = rows[0]["metrics"].get(metric, {"n": 0})
    tried = rows[0]["tried"]
    if not values["n"]:
        if metric == "recover_s":
            return f"0 of {tried} recovered"
        return "failed"
    text = f"{values['median']:.3g} {unit}".rstrip()
    if values["n"] < tried:
        return f"{text} ({values['n']} of {tried})"
    return text


def main() -> None:
    """Replaces what stands between the marks."""
    record = Path(sys.argv[1])
    found = json.loads(record.read_text())
    machine = found["machine"]
    words = (
        f"Measured on {machine['cpus']} cores, Python {machine['python']}, torch {machine['torch']}, all launchers\n"
        "taking turns in one run: "
        f"`python -m scripts.bench {' '.join(sys.argv[2:])}`. Medians; a lower figure is better.\n"
    )
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] or rest
    README.write_text(f"{before}{BEGIN}\n{words}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    main()
