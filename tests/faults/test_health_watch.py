"""A node that becomes unhealthy while its ranks run: it is told at once, and the ranks go on."""

from __future__ import annotations

from tests.faults.conftest import StartJob
from tests.faults.training import Plan


def test_a_node_that_becomes_unhealthy_is_reported_and_the_ranks_go_on(start_job: StartJob) -> None:
    job = start_job(
        Plan(hold=4),
        2,
        "--ft-node-health-check-interval=0.2",
        "--ft-node-check=if test -e sick; then echo the fan stands still; exit 3; fi",
    )
    job.until_ranks_train()
    sick = job.folder / "sick"
    sick.touch()
    told = job.until(lambda: job.journal("health_change"), "the unhealthy node to be reported")
    assert [(line["check"], line["before"], line["state"]) for line in told] == [("node_check", "ok", "unhealthy")]
    assert "the fan stands still" in told[0]["reason"]
    # Two threads write: the line may be on the console after the event is in the journal.
    line = "this node is unhealthy: node_check: exit code 3: the fan stands still. The ranks go on"
    job.until(lambda: line in job.output, "the line about it")
    sick.unlink()
    job.until(lambda: len(job.journal("health_change")) == 2, "its recovery to be reported")
    assert job.journal("health_change")[1]["state"] == "ok"
    job.go()
    assert job.finish() == 0, job.tail()
    assert not job.journal("fault") and [line["how"] for line in job.journal("cycle_end")] == ["succeeded"]
