"""Scripts written for the peer, run by `ft_launcher --ft-alias-nvrx` without a change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.training import Plan
from tests.program import ROOT

HANG_AT = 5
MEGATRON = Path(__file__).with_name("megatron_style.py")
CONFIG = f"--fault-tol-cfg-path={ROOT}/configs/megatron.yaml"
PRELOAD = "--ft-preload=torch._dynamo"  # what DDP imports, or each rank of each cycle would
FLAGS = (CONFIG, "--ft-alias-nvrx", "--ft-param-learned_limit_floor=2", PRELOAD)


@pytest.mark.timeout(300)
def test_megatrons_sequence_learns_in_one_job_and_is_judged_by_it_in_the_next(
    start_job: StartJob,
    tmp_path: Path,
) -> None:
    (tmp_path / "order.json").write_text('{"hang_at": null}')
    first = start_job(Plan(), 2, *FLAGS, name="first", script=MEGATRON)
    assert first.finish(120) == 0, first.tail()
    nothing_left(first)
    assert first.journal("verdict") == []
    states = [json.loads((tmp_path / f"state-of-{rank}").read_text()) for rank in range(2)]
    assert states[0] == states[1], "agreed over the ranks"
    learned = states[0]["current_timeouts"]["section"]
    assert learned["calculated_sections"] == ["checkpointing", "setup", "step"]
    assert learned["section"]["setup"] >= 3.0, "five times what the slower rank took"
    assert learned["is_out_of_section_calculated"]

    (tmp_path / "order.json").write_text(json.dumps({"hang_at": HANG_AT}))
    second = start_job(Plan(), 2, *FLAGS, "--max-restarts=1", name="second", script=MEGATRON)
    assert second.finish(120) == 0, second.tail()
    nothing_left(second)
    condemned = [verdict for verdict in second.journal("verdict") if verdict["condemned"]]
    assert {(one["limit"], one["limit_s"]) for one in condemned} == {("section:step", learned["section"]["step"])}
    (fault,) = second.journal("fault")
    assert (fault["kind"], fault["limit"]) == ("hang", "section:step"), second.tail()
    assert {one["iteration"] for one in condemned} <= {HANG_AT, HANG_AT + 1}, "by Megatron's global arguments"
    assert second.journal("limit_doubled"), second.tail()
    after = json.loads((tmp_path / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert after["calculated_sections"] == learned["calculated_sections"]
