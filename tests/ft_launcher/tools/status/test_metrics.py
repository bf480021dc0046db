"""Metrics as Prometheus' own parser reads them."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from ft_launcher.record import events
from ft_launcher.tools.status import metrics
from rank_monitor.contract.wire.rank_times import Durations
from tests.ft_launcher.tools.status.test_node_status import (
    CYCLE,
    LOADED,
    READINGS,
    SAVED,
    START,
    TIMES,
    after,
    decision,
    fault,
    ledger,
)


def read(body: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_what_is_exported() -> None:
    scored = events.SectionTimesEvent(
        1, 1, {"step": {"relative": 0.5}, "data": {"relative": 0.25}}, {"individual": 0.75}
    )
    again = replace(CYCLE, cycle=1)
    status = after(START, CYCLE, fault(), decision(), again, scored, ledger(1, -1, 40, stop=0.5, start=2.0))
    durations = Durations()
    for milliseconds in (900, 100, 100, 100, 2000):
        durations.add(milliseconds * 1_000_000)
    times = replace(TIMES, durations={"step": durations, "data": durations}, steps_lost=4)
    found = read(metrics.as_metrics(status.facts(), READINGS, times, {"active": 2}, now=101.0, version="1.2"))

    def value(name: str, **labels: str) -> float:
        return found[f"ft_launcher_{name}", tuple(sorted(labels.items()))]

    assert value("build_info", version="1.2") == 1
    assert value("job_info", run_id="train-7", job_name="train-7", node="host-a", node_rank="1") == 1
    assert (value("cycle"), value("restarts_left"), value("step"), value("step_saved")) == (1, 2, 41, 40)
    assert value("faults_total", fault_class="hang", kind="hang") == 1
    assert value("restarts_total", rung="relaunch", charged="true") == 1
    assert value("recovery_seconds_sum", phase="start") == 2.0 and value("steps_lost_total") == 4
    assert value("recovery_seconds_bucket", phase="stop", le="0.3") == 0
    assert value("recovery_seconds_bucket", phase="stop", le="1.0") == 1
    assert value("step_seconds_count") == 4  # the first one of a cycle is its warm-up
    assert value("step_seconds_bucket", le="+Inf") == 4
    assert value("section_seconds_total", section="data") == 3.2
    assert value("time_seconds", category="step") == 0.9
    assert value("goodput_ratio", window="job") == 0.9
    assert value("rank_sign_age_seconds", rank="1") == 13.0
    assert value("straggler_score", rank="1", kind="relative") == 0.25
    assert value("straggler_score", rank="1", kind="individual") == 0.75
    assert value("rank_state", rank="0", state="training") == 1
    assert sum(name == "ft_launcher_rank_state" for name, _ in found) == len(READINGS)
    assert (value("ranks", state="training"), value("ranks", state="hung")) == (len(READINGS), 0)


def test_state_in_memory() -> None:
    status = after(START, CYCLE, LOADED, SAVED)
    status.read(READINGS, "", replace(SAVED, cycle=1, newest=60, reached=63, saves=2, cost_s=0.25, copied=55))
    found = read(metrics.as_metrics(status.facts(), READINGS, None, {}, now=101.0, version="1.2"))
    assert {
        name.removeprefix("ft_launcher_memory_"): value for (name, _), value in found.items() if "_memory_" in name
    } == {
        "loads_total": 1,
        "refused_total": 1,
        "steps_lost_total": 24,
        "step": 60,
        "steps_behind": 3,
        "copied_step": 55,
        "saves_total": 6,
        "saves_failed_total": 2,
        "save_seconds_total": 0.75,
        "save_ratio": 0.009,
        "bytes": 3072,
        "limit_bytes": 9216,
    }
    assert found["ft_launcher_memory_loads_total", (("tier", "memory"),)] == 1


def test_a_job_that_has_just_begun() -> None:
    found = read(metrics.as_metrics(after().facts(), (), None, {}, 0.0, "1.2"))
    assert found["ft_launcher_steps_lost_total", ()] == 0
    assert not [name for name, _ in found if "_memory_" in name]
