"""Writes the state of the job on this node as metrics for Prometheus, by its client library (the extra `observe`).

`answers.py` imports this file at the first request for `/metrics`. Metrics are made when they are asked for, from the
same facts as `/status.json`; nothing is counted in between. The number of series is bounded: run id, host and job name
are labels of `job_info` only, and no text that a rank wrote is a label anywhere. docs/status.md has the table of all
metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample
from prometheus_client.registry import Collector

from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.tools.status.memory_status import MemoryFacts
from ft_launcher.tools.status.node_status import RECOVERY_BOUNDS_S, Facts, RankReading
from ft_launcher.tools.status.summary import RankState, rank_state
from rank_monitor.contract.wire.rank_times import BOUNDS_NS, STEP, Durations

PREFIX = "ft_launcher_"
KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the text format."""

_Value = tuple[dict[str, str], float]
"""The labels of one sample, and its value."""


def as_metrics(
    facts: Facts,
    readings: Sequence[RankReading],
    times: JobTime | None,
    nodes: Mapping[str, int],
    now: float,
    version: str,
) -> bytes:
    """Returns all metrics in Prometheus' text format.

    Args:
        readings: of the ranks of this node.
        times: the job's time until now; None: no time is kept.
        nodes: state -> number of nodes of the job; empty: another launcher exports them.
        now: monotonic seconds.
        version: the version of the launcher.
    """

    class Once(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from _of_job(facts, version)
            steps_lost = 0 if times is None else times.steps_lost
            yield _counter("steps_lost", "Steps that were done again.", [({}, steps_lost)])
            counts = [({"state": state}, number) for state, number in nodes.items()]
            yield _gauge("nodes", "Nodes in the cycle (active), and those that wait for a place.", counts)
            if times is not None:
                yield from _of_times(times)
            yield from _of_memory(facts.memory)
            yield from _of_ranks(readings, facts, times, now)

    return generate_latest(Once())


def _of_job(facts: Facts, version: str) -> Iterator[Metric]:
    """Yields what the journal's events add up to: names, cycles, faults, restarts, recoveries, checks."""
    yield _gauge("build_info", "Version of the launcher.", [({"version": version}, 1)])
    names = {
        "run_id": facts.run_id,
        "job_name": facts.job_name,
        "node": facts.node,
        "node_rank": str(facts.node_rank),
    }
    yield _gauge("job_info", "What the job is called, and where this is.", [(names, 1)])
    if facts.cycle is not None:
        yield _gauge("cycle", "The present or last cycle, from 0.", [({}, facts.cycle)])
    if facts.restarts_left is not None:
        yield _gauge("restarts_left", "What is left of --max-restarts.", [({}, facts.restarts_left)])
    ends = [({"end": end}, count) for end, count in facts.cycle_ends.items()]
    yield _counter("cycles", "Cycles that have ended, by how.", ends)
    faults = [({"fault_class": of, "kind": kind}, count) for (of, kind), count in facts.faults_by.items()]
    yield _counter("faults", "Faults of ranks of this node.", faults)
    restarts = [({"rung": level, "charged": str(charged).lower()}, n) for (level, charged), n in facts.restarts.items()]
    yield _counter("restarts", "Restarts, by what restarted and by whether they count against the budget.", restarts)
    recovery = HistogramMetricFamily(
        f"{PREFIX}recovery_seconds", "Time of each phase of the recoveries that are over.", labels=["phase"]
    )
    for phase, spent in facts.recoveries.items():
        buckets = [(str(bound), float(n)) for bound, n in zip(RECOVERY_BOUNDS_S, spent.within, strict=True)]
        recovery.add_metric([phase], [*buckets, ("+Inf", float(spent.count))], spent.sum_s)
    yield recovery
    healthy = [({"check": check}, float(state != "unhealthy")) for check, state in facts.health.items()]
    yield _gauge("health_ok", "Whether a check that had something to report lets this node take part.", healthy)
    yield _counter("journal_dropped", "Events that are in no file.", [({}, facts.lines_dropped)])
    yield _counter("monitors_replaced", "Monitors of ranks that were lost.", [({}, facts.monitors_replaced)])


def _of_times(times: JobTime) -> Iterator[Metric]:
    """Yields what the time ledger knows: steps, seconds by category, goodput, durations of steps and sections."""
    present, account = times.present, times.account
    if present.iteration is not None:
        yield _gauge("step", "The last step that is done.", [({}, present.iteration)])
    if present.saved is not None:
        yield _gauge("step_saved", "The last step that is in a checkpoint.", [({}, present.saved)])
    # A gauge and no counter: the seconds of steps that turn out to be lost move from `step` to `lost_progress`.
    seconds = [({"category": category}, spent_s) for category, spent_s in account.seconds.items()]
    yield _gauge("time_seconds", "Time of the job by category; the sum is its wall time.", seconds)
    yield _gauge("goodput_ratio", "Share of the time of steps that count.", [({"window": "job"}, account.goodput)])
    saved = [({"window": "job"}, account.goodput_saved)]
    yield _gauge("goodput_saved_ratio", "The same, of steps that are in a checkpoint.", saved)
    steps = times.durations.get(STEP, Durations())
    yield _histogram("step_seconds", "Time of the steps, without the first of each cycle.", steps)
    spent = [({"section": name}, known.whole_ns / 1e9) for name, known in times.durations.items()]
    yield _counter("section_seconds", "Time in sections of one rank of this node that have ended.", spent)


def _of_memory(memory: MemoryFacts) -> Iterator[Metric]:
    """Yields what is known of the training's state in memory; nothing where it never looked for it."""
    if memory.loaded is not None:
        loads = [({"tier": tier}, count) for tier, count in memory.loads.items()]
        yield _counter("memory_loads", "Looks for state in memory, by where the training went on from.", loads)
        yield _counter("memory_refused", "Generations in memory that were not used.", [({}, memory.refused)])
        text = "Steps computed again after a look for state in memory."
        yield _counter("memory_steps_lost", text, [({}, memory.steps_lost)])
    saved = memory.saved
    if saved is None:
        return
    if saved.newest is not None:
        yield _gauge("memory_step", "The newest step that is complete in memory.", [({}, saved.newest)])
        yield _gauge("memory_steps_behind", "Steps done since the newest step in memory.", [({}, memory.behind or 0)])
    if saved.copied is not None:
        yield _gauge("memory_copied_step", "The newest step of which other nodes have a copy.", [({}, saved.copied)])
    saves = memory.saves
    yield _counter("memory_saves", "Saves in memory that each rank has finished.", [({}, saves.count)])
    yield _counter("memory_saves_failed", "Saves in memory that have failed.", [({}, saves.failed)])
    yield _counter("memory_save_seconds", "Time that saves in memory held up the training.", [({}, saves.cost_s)])
    if saved.share is not None:
        yield _gauge("memory_save_ratio", "Share of the time that saves took in this cycle.", [({}, saved.share)])
    yield _gauge("memory_bytes", "Memory that the files of this node take.", [({}, saved.in_use)])
    yield _gauge("memory_limit_bytes", "Memory that the files of this node may take.", [({}, saved.limit)])


def _of_ranks(readings: Sequence[RankReading], facts: Facts, times: JobTime | None, now: float) -> Iterator[Metric]:
    """Yields what is known of each rank of this node, and how many ranks are in each state."""
    # Generators, since a node of many ranks has thousands of samples; see `_filled`.
    scored = (
        ({"rank": str(rank), "kind": kind}, score)
        for rank, scores in facts.scores.items()
        for kind, score in scores.items()
    )
    ages = (
        ({"rank": str(reading.rank)}, reading.sign_age_s + max(0.0, now - reading.read_at))
        for reading in readings
        if reading.read_at is not None and reading.sign_age_s is not None
    )
    present = [rank_state(reading, facts, times) for reading in readings]
    by_rank = zip(readings, present, strict=True)
    states = (({"rank": str(reading.rank), "state": str(state)}, 1.0) for reading, state in by_rank)
    counts = Counter(present)
    yield _gauge("straggler_score", "Speed of a rank by straggler detection; 1: as the fastest, or its best.", scored)
    yield _gauge("rank_sign_age_seconds", "Age of the last sign of life of a rank of this node.", ages)
    # Only the state that a rank is in gets a sample. The states that it is not in would be four fifths of all samples.
    yield _gauge("rank_state", "1 for the state of a rank of this node.", states)
    totals = [({"state": str(state)}, counts[state]) for state in RankState]
    yield _gauge("ranks", "Ranks of this node in each state.", totals)


def _gauge(name: str, text: str, samples: Iterable[_Value]) -> Metric:
    """Returns a gauge. `samples` may be a generator, and is read once."""
    made = GaugeMetricFamily(f"{PREFIX}{name}", text)
    return _filled(made, made.name, samples)


def _counter(name: str, text: str, samples: Iterable[_Value]) -> Metric:
    """Returns a counter, under a name that ends in `_total` as the format demands."""
    made = CounterMetricFamily(f"{PREFIX}{name}", text)
    return _filled(made, f"{made.name}_total", samples)


def _filled(made: Metric, name: str, samples: Iterable[_Value]) -> Metric:
    """Gives a metric the samples of the name `name`."""
    # Each sample is made when it is written, and freed at once. If 6,000 samples live at the same time, Python's
    # garbage collector searches them for reference cycles, and with them all objects of torch. That doubles the time of
    # an answer.
    made.samples = (Sample(name, labels, number) for labels, number in samples)  # type: ignore[assignment]
    return made


def _histogram(name: str, text: str, durations: Durations) -> Metric:
    """Returns a histogram of durations, with every second bound: powers of two. Half the series say as much."""
    made = HistogramMetricFamily(f"{PREFIX}{name}", text, labels=[])
    reached, buckets = 0, []
    for bucket, bound in enumerate(BOUNDS_NS):
        reached += durations.buckets.get(bucket, 0)
        if bucket % 2 == 0:
            buckets.append((str(bound / 1e9), float(reached)))
    count = float(sum(durations.buckets.values()))
    made.add_metric([], [*buckets, ("+Inf", count)], durations.sum_ns / 1e9)
    return made
