"""What all ranks of a cycle find in their environment, and which GPUs they see once a result of one is in doubt."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ft_launcher.ranks.environment import Relocation, another_device, cycle_environment
from rank_monitor.contract.settings.config import NcclSettings, RecordSettings, Settings, StartSettings
from rank_monitor.contract.wire.messages import ResultInDoubt

ALIAS, INJECT = "FT_ALIAS_NVRX", "FT_INJECT"
UUIDS = ["GPU-a", "GPU-b", "GPU-c", None]
DOUBT = ResultInDoubt("reproducible", 1, 7, "a", "cuda:GPU-1")


def found(settings: Settings, environ: Mapping[str, str], is_program: bool = False) -> dict[str, str]:
    """The variables of a first cycle beside NCCL's."""
    of_cycle = cycle_environment(settings, environ, is_program, {}, Relocation())
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
    assert cycle_environment(Settings(nccl=nccl), environ, False, {}, Relocation()) == {
        "FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC": "60",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    }
    assert dict(os.environ) == before


def test_ranks_that_moved_are_told_why_and_see_other_devices() -> None:
    moved = cycle_environment(Settings(), {}, False, {"step": 2.0}, Relocation(DOUBT, "GPU-2,GPU-3"))
    assert json.loads(moved["FT_LIMIT_MULTIPLIERS"]) == {"step": 2.0}
    assert ResultInDoubt(**json.loads(moved["FT_RESULT_IN_DOUBT"])) == DOUBT
    assert moved["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3"


@pytest.mark.parametrize(
    ("device", "ranks", "asked", "former", "seen"),
    [
        ("cuda:b", 2, "0,1,2", "", "GPU-a,GPU-c"),
        ("cuda:GPU-b", 2, "0,1,2", "", "GPU-a,GPU-c"),
        ("cuda:b", 3, "0,1,2", "", "GPU-b,GPU-c,GPU-a"),
        ("cuda:a", 2, "2,0", "", "GPU-a,GPU-c"),
        ("cuda:a", 2, "0,1,2", "GPU-a,GPU-c", "GPU-c,GPU-a"),
        ("cuda:b", 1, "0", "", None),
        ("cuda:a", 1, "0", "", None),
        ("cuda:a", 1, "GPU-a,GPU-b", "", "GPU-b"),
        ("cuda:a", 4, None, "", None),
        ("cuda:0", 2, "0,1,2", "", None),
        ("cpu", 2, "0,1,2", "", None),
    ],
)
def test_what_they_see(device: str, ranks: int, asked: str | None, former: str, seen: str | None) -> None:
    doubt = ResultInDoubt("reproducible", 1, 7, "a", device)
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    found = another_device(doubt, ranks, environ, UUIDS, Relocation(None, former))
    assert found == (None if seen is None else Relocation(doubt, seen))


def test_without_a_doubt_or_gpus_nothing_moves() -> None:
    assert another_device(None, 1, {}, ["GPU-a", "GPU-b"], Relocation()) is None
    assert another_device(ResultInDoubt("reproducible", 1, 7, "a", "cuda:a"), 1, {}, [], Relocation()) is None
