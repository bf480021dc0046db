"""From values to the printed table and the JSON record. Pure: knows no process and no clock."""

from __future__ import annotations

import math
import statistics
from typing import Any

from .scenario import Outcome, Results, Scenario

FLOOR = "floor"
OURS = "ours"


def summary(values: list[float]) -> dict[str, Any]:
    """Median, extremes, p99 (nearest rank) and all values; an endless value is written as "blocked"."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    found = {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p99": ordered[math.ceil(len(ordered) * 0.99) - 1],
    }
    plain = {key: plain_number(value) for key, value in found.items()}
    return {"n": len(values), **plain, "values": [plain_number(value) for value in values]}


def plain_number(value: float) -> float | str:
    """JSON has no infinity."""
    return round(value, 6) if math.isfinite(value) else "blocked"


def record(scenario: Scenario, results: Results) -> dict[str, Any]:
    """The scenario's part of the JSON."""
    rows = []
    for (ranks, launcher), outcome in results.items():
        metrics = {metric: summary(values) for metric, values in outcome.values.items()}
        row = {"ranks": ranks, "launcher": launcher, "tried": outcome.tried, "metrics": metrics}
        rows.append({**row, "failures": outcome.failures})
    return {"keys": scenario.keys, "title": scenario.title, "marks": scenario.marks, "results": rows}


def render(scenario: Scenario, results: Results) -> str:
    """The scenario's part of the table: medians, (min..max), how many of how many, and ratios."""
    launchers = list(dict.fromkeys(name for _, name in results))
    peers = [name for name in launchers if name not in (FLOOR, OURS)]
    pairs: list[tuple[str, str]] = []
    if OURS in launchers:
        pairs = [(OURS, FLOOR), *((name, OURS) for name in peers)]
    rows = [["ranks", "metric", *launchers, *(f"{above}/{below}" for above, below in pairs)]]
    metrics = dict.fromkeys(metric for outcome in results.values() for metric in outcome.values)
    for ranks in dict.fromkeys(ranks for ranks, _ in results):
        for metric in metrics:
            outcomes = {name: results.get((ranks, name), Outcome()) for name in launchers}
            cells = [cell(outcome, metric) for outcome in outcomes.values()]
            medians = {name: median(outcome, metric) for name, outcome in outcomes.items()}
            rows.append([str(ranks), metric, *cells, *(ratio(medians.get(a), medians.get(b)) for a, b in pairs)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failures = [
        f"  failed: {name}, {ranks} ranks: {text[:240]}" for (ranks, name), o in results.items() for text in o.failures
    ]
    return "\n".join([f"{'/'.join(scenario.keys)}: {scenario.title}  [mark: {scenario.marks}]", *lines, *failures])


def cell(outcome: Outcome, metric: str) -> str:
    """`median (min..max) n/tried`."""
    values = outcome.values.get(metric, [])
    count = f"{len(values)}/{outcome.tried}"
    if not values:
        if outcome.failures:
            return count
        return "-"
    return f"{short(statistics.median(values))} ({short(min(values))}..{short(max(values))}) {count}"


def median(outcome: Outcome, metric: str) -> float | None:
    """The median, or nothing."""
    values = outcome.values.get(metric)
    return statistics.median(values) if values else None


def ratio(above: float | None, below: float | None) -> str:
    """How many times, where that means something."""
    if above is None or below is None or below <= 0 or not math.isfinite(below):
        return "-"
    return "endless" if math.isinf(above) else f"{above / below:.2f}x"


def short(value: float) -> str:
    """Three digits that count."""
    if math.isinf(value):
        return "blocked"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
