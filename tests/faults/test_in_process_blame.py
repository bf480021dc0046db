"""Ranks in an in-process wrapper that make no progress: who held up the others is told, also to the function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import hang_worker
from tests.faults.conftest import StartJob
from tests.faults.test_guilty_rank import HAS_RECORDER
from tests.faults.training import Plan
from tests.patience import patient

WORKER = Path(__file__).with_name("in_process_blame_worker.py")
RANKS = 3
SOFT_S = 4.0


@pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder that answers in JSON")
def test_the_function_is_told_who_held_up_the_others(start_job: StartJob, tmp_path: Path) -> None:
    """Twice, another rank each time: what the recorder kept of the first hang says nothing about the second."""
    faulty = [1, 2]
    (tmp_path / "hang").write_text(" ".join(map(str, faulty)))
    job = start_job(Plan(), RANKS, script=WORKER)
    assert job.finish(180) == 0, job.tail()
    blames = job.journal("in_process_blame")
    assert [(blame["iteration"], blame["finding"], blame["ranks"]) for blame in blames] == [
        (0, "behind", [1]),
        (1, "behind", [2]),
    ]
    for call, (rank, blame) in enumerate(zip(faulty, blames, strict=True), 1):
        assert blame["text"].startswith(f"rank {rank} never entered all_reduce {5 - call} of group "), blame
        assert "2 ranks wait for it; it is at in_process_blame_worker.py" in blame["text"]
        told = [json.loads((tmp_path / f"told.{call}.{number}").read_text()) for number in range(RANKS)]
        assert told == [{"ranks": [rank], "finding": "behind", "text": blame["text"]}] * RANKS
        assert job.output.count(f"ft_launcher: {blame['text']}; the ranks restart in process") == 1


@pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder that answers in JSON")
@pytest.mark.parametrize(
    ("kind", "finding"), [("returns early", "gone"), ("waits for a lock", "behind"), ("stops", "gone")]
)
def test_a_rank_that_seems_to_wait_as_the_others_do(
    start_job: StartJob, tmp_path: Path, kind: str, finding: str
) -> None:
    """It waits in C code, as they do in `work.wait()`: in our own wrapper, or at a line whose text says for what. Or it
    was stopped, and nobody must wait for its answer."""
    (tmp_path / "hang").write_text(f"{kind}:1:wrapped={patient(SOFT_S)}")
    job = start_job(Plan(), 4, script=Path(hang_worker.__file__))
    assert job.finish(180) == 0, job.tail()
    told = [json.loads(file.read_text()) for file in tmp_path.glob("told.*")]
    called_again = 3 if kind == "stops" else 4  # that one is killed, and the others go on without it
    assert [(one["ranks"], one["finding"]) for one in told] == [([1], finding)] * called_again, job.tail()
