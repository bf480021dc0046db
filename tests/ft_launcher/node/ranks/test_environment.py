"""What all ranks of a cycle find in their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ft_launcher.node.ranks.environment import cycle_environment
from rank_monitor.contract.settings.config import NcclSettings, RecordSettings, Settings, StartSettings
from rank_monitor.contract.wire.messages import ResultInDoubt

ALIAS, INJECT = "FT_ALIAS_NVRX", "FT_INJECT"
DOUBT = ResultInDoubt("reproducible", 1, 7, "a", "cuda:GPU-1")


def found(settings: Settings, environ: Mapping[str, str], is_program: bool = False) -> dict[str, str]:
    """The variables of a first cycle beside NCCL's."""
    of_cycle = cycle_environment(settings, environ, is_program, {}, None)
    return {name: text for name, text in of_cycle.items() if "NCCL" not in name}


def test_alias_and_faults_on_purpose_reach_the_ranks() -> None:
    start = replace(StartSettings(), alias_nvrx=True, inject=("rank:1,kind:sigkill", "kind:sleep"))
    assert found(Settings(start=start), {}) == {ALIAS: "1", INJECT: "rank:1,kind:sigkill;kind:sleep"}


def test_what_is_off_is_said_only_against_the_launchers_own_environment() -> None:
    assert found(Settings(), {}) == {}
    assert found(Settings(), {ALIAS: "1", INJECT: "kind:sleep"}) == {ALIAS: "0", INJECT: ""}


@pytest.mark.parametrize(
    ("watch_log", "is_program", "environ", "is_set"),
    [
        ("tqdm", True, {}, True),
        ("tqdm", True, {"PYTHONUNBUFFERED": ""}, False),
        ("tqdm", False, {}, False),
        (None, True, {}, False),
    ],
)
def test_programs_whose_output_is_read_print_each_line_at_once_unless_the_user_decides_it(
    watch_log: str | None, is_program: bool, environ: dict[str, str], is_set: bool
) -> None:
    settings = Settings(record=replace(RecordSettings(), watch_log=watch_log))
    assert found(settings, environ, is_program) == ({"PYTHONUNBUFFERED": "1"} if is_set else {})


def test_ranks_find_the_file_of_the_running_cycle(tmp_path: Path) -> None:
    settings = Settings(record=RecordSettings(cycle_info_dir=str(tmp_path), cycle_info_job_id="mine"))
    assert found(settings, {}) == {"NVRX_CURRENT_CYCLE_INFO": str(tmp_path / "cycle_info.mine.current")}


def test_nccls_settings_reach_the_ranks_and_not_the_launcher() -> None:
    before, nccl = dict(os.environ), NcclSettings(nccl_collective_timeout=60.0, nccl_async_error_handling=2)
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    assert cycle_environment(Settings(nccl=nccl), environ, False, {}, None) == {
        "FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC": "60",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }
    assert dict(os.environ) == before


def test_ranks_that_moved_are_told_why() -> None:
    moved = cycle_environment(Settings(), {}, False, {"step": 2.0}, DOUBT)
    assert json.loads(moved["FT_LIMIT_MULTIPLIERS"]) == {"step": 2.0}
    assert ResultInDoubt(**json.loads(moved["FT_RESULT_IN_DOUBT"])) == DOUBT
