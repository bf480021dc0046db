"""`--ft-save-interval auto` in a real job: chosen for each cycle, with what is known then, and known to the ranks."""

from __future__ import annotations

from pathlib import Path

from ft_launcher.tools.report.advice import best_interval_s
from tests.faults.conftest import StartJob
from tests.faults.test_attribution import script
from tests.faults.training import Plan
from tests.ft_launcher.tools.report.lines import Line, as_bytes, begins, end, line, part, start

ASKS = """
import os
import ft_client as ft
import torch.distributed as dist
from ft_client.rank.saving import interval_of

dist.init_process_group("gloo")
client = ft.init()
with ft.section("checkpointing"):
    pass
assert not ft.should_save()
print(f"rank {dist.get_rank()} saves every {interval_of(client.cfg.save_interval, os.environ)}")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
"""


def earlier_attempt(run_id: str) -> list[Line]:
    """Three cycles that failed on another node, one in 3000 s, with a save of 5 s in each."""
    lines = [start(0, "earlier", run_id)]
    for cycle in range(3):
        since = cycle * 3000
        lines.append(begins(since, cycle) | {"master": "127.0.0.1:1"})
        lines.append(line("cycle_end", since + 3000, cycle=cycle, how="failed elsewhere"))
        seconds = {"step": 2900.0, "checkpoint_save": 5.0}
        lines.append(part(cycle, since, since + 3000, seconds=seconds, saves=1))
    return [*lines, end(9000, 80)]


def test_the_first_value_until_enough_is_known(start_job: StartJob, tmp_path: Path) -> None:
    flags = ("--ft-save-interval=auto", "--max-restarts=1")
    job = start_job(Plan(), 2, *flags, script=script(tmp_path, ASKS))
    assert job.finish() == 0, job.tail()
    first, second = job.journal("save_interval")
    assert (first["cycle"], first["interval_s"], first["faults"], first["save_s"]) == (0, 1800.0, 0, None)
    assert (second["cycle"], second["interval_s"], second["faults"]) == (1, 1800.0, 1)
    assert second["save_s"] is not None and "1 fault so far, too few" in second["reason"], job.tail()
    for rank in (0, 1):
        assert job.output.count(f"rank {rank} saves every 1800.0") == 2, job.tail()
    assert "ranks save every 30 min, the first value: nothing is known of the job yet" in job.output


def test_earlier_attempts_count(start_job: StartJob, tmp_path: Path) -> None:
    folder = tmp_path / "node.journal"
    folder.mkdir()
    (folder / "journal.earlier.jsonl").write_bytes(as_bytes(earlier_attempt("again")))
    (folder / "journal.other.jsonl").write_bytes(as_bytes(earlier_attempt("another job")))
    # torch makes up an id for one node that has no endpoint.
    place = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=again")
    flags = ("--ft-save-interval=auto", "--max-restarts=1", *place)
    job = start_job(Plan(), 1, *flags, script=script(tmp_path, ASKS))
    assert job.finish() == 0, job.tail()
    first, second = job.journal("save_interval")
    assert (first["faults"], first["save_s"], first["mtbf_s"]) == (3, 5.0, 3000.0), job.tail()
    assert first["interval_s"] == best_interval_s(5.0, 3000.0)
    # The years between the attempts are of the job, too.
    assert (second["faults"], second["interval_s"]) == (4, 4 * 3600.0), job.tail()
    assert f"rank 0 saves every {first['interval_s']}" in job.output
