"""What ranks find in their environment by the options of their start."""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.ranks.environment import printing_environment, start_environment
from rank_monitor.contract.settings.config import RecordSettings, StartSettings

ALIAS, INJECT = "FT_ALIAS_NVRX", "FT_INJECT"


def test_alias_and_faults_on_purpose_reach_the_ranks() -> None:
    settings = replace(StartSettings(), alias_nvrx=True, inject=("rank:1,kind:sigkill", "kind:sleep"))
    assert start_environment(settings, {}) == {ALIAS: "1", INJECT: "rank:1,kind:sigkill;kind:sleep"}


def test_what_is_off_is_said_only_against_the_launchers_own_environment() -> None:
    assert start_environment(StartSettings(), {}) == {}
    assert start_environment(StartSettings(), {ALIAS: "1"}) == {ALIAS: "0"}


def test_programs_whose_output_is_read_print_each_line_at_once_unless_the_user_decides_it() -> None:
    read = replace(RecordSettings(), watch_log="tqdm")
    assert printing_environment(read, {}) == {"PYTHONUNBUFFERED": "1"}
    assert printing_environment(read, {"PYTHONUNBUFFERED": ""}) == {}
    assert printing_environment(RecordSettings(), {}) == {}
