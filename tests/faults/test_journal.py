"""The journal of real jobs: every line is as documented, and its size on the disk is bounded."""

from __future__ import annotations

from dataclasses import fields

from ft_launcher.record.events import EVENTS
from ft_launcher.record.journal_reader import Problems, read_journals
from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.training import Plan, PlannedFault

CRASHES = Plan(
    (
        PlannedFault("exception", "step", 4, 1),
        PlannedFault("SIGKILL", "step", 6, 1),
        PlannedFault("exit 3", "step", 8, 1),
    )
)


def finish(job: Job) -> None:
    assert job.finish() == 0, job.tail()


def test_every_line_is_as_documented(start_job: StartJob) -> None:
    job = start_job(CRASHES, 2, "--max-restarts=3")
    finish(job)
    findings = Problems()
    found = list(read_journals([job.journal_folder], findings))
    assert findings == Problems(), job.tail()
    assert (found[0].event, found[-1].event) == ("job_start", "job_end")
    assert [entry.facts["how"] for entry in found if entry.event == "cycle_end"] == ["failed"] * 3 + ["succeeded"]
    assert len({(entry.run_id, entry.node, entry.attempt) for entry in found}) == 1 and found[0].attempt == 1
    for entry in found:
        assert entry.facts.keys() <= {field.name for field in fields(EVENTS[entry.event])}, entry


def test_a_small_journal_stays_small(start_job: StartJob) -> None:
    job = start_job(CRASHES, 2, "--max-restarts=3", "--ft-journal-max-mb=0.001")
    finish(job)
    files = list(job.journal_folder.iterdir())
    assert len(files) == 3
    found = list(read_journals([job.journal_folder], Problems()))
    longest = sorted(len(line) + 1 for file in files for line in file.read_bytes().splitlines())[-2:]
    assert sum(file.stat().st_size for file in files) <= 3 * max(sum(longest), int(0.001 * (1 << 20)))
    assert (found[0].event, found[-1].event) == ("job_start", "job_end")
    assert "journal_piece" in {entry.event for entry in found}
