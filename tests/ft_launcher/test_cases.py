"""Command lines of public batch scripts, and every option of NVIDIA's launcher in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_launcher.settings import options
from ft_launcher.settings.job_settings import Job
from ft_launcher.tools.commands import dry_run

DATA = Path(__file__).resolve().parents[1] / "data"
CASES = yaml.safe_load((DATA / "cli_invocations.yaml").read_text())
NVRX = yaml.safe_load((DATA / "nvrx_flags.yaml").read_text())
JobOf = Callable[..., Job]

YAML = "fault_tolerance: {rank_heartbeat_timeout: 123, safety_factor: 7}\n"
OF_TORCH = {"nproc_per_node", "max_restarts", "min_nodes", "max_nodes"}


def setting(job: Job, key: str) -> Any:
    (group,) = (group for group in vars(job.settings).values() if hasattr(group, key))
    return getattr(group, key)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_line_people_use(case: dict[str, Any], job_of: JobOf, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, config = folder / "run.sh", folder / "ft.yaml"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    config.write_text(YAML)
    for name, value in case.get("env", {}).items():
        monkeypatch.setenv(name, value)
    words = [word.format(script=script, yaml=config) for word in case["args"]]
    job = job_of(*words)
    assert words[len(words) - len(script_args(job)) :] == script_args(job)
    for key, expected in case["expect"].items():
        assert seen(job, key, config) == expected, key


def script_args(job: Job) -> list[str]:
    if job.no_python:
        return list(job.args)
    return list(job.args)[2 + job.script.startswith("-m ") :]


def seen(job: Job, key: str, config: Path) -> Any:
    """What a key of the case's `expect` means here."""
    if key in OF_TORCH:
        return getattr(job.launch_config, key)
    if key == "warns":
        return sum("is accepted and does nothing here" in warning for warning in job.warnings)
    if key == "warm_start":
        return dry_run.start_of(job) != "exec"
    if key == "module":
        return job.script.removeprefix("-m ")
    if key == "from_yaml":
        return (setting(job, "safety_factor"), job.sources["safety_factor"]) == (7, str(config))
    if key == "script_args":
        return script_args(job)
    return setting(job, key)


def spellings(flag: str) -> list[str]:
    key = flag.replace("-", "_")
    return [f"{prefix}{form}" for prefix in ("--ft-", "--ft-param-", "--ft_", "--ft_param_") for form in (key, flag)]


@pytest.mark.parametrize("flag", [*NVRX["same"], *NVRX["ours"]])
def test_an_option_with_a_meaning_is_a_setting_in_all_spellings(flag: str) -> None:
    assert {options.key_of(spelling) for spelling in spellings(flag)} == {flag.replace("-", "_")}
    assert flag.replace("-", "_") in options.GROUP_OF


@pytest.mark.parametrize("flag", NVRX["accept"])
def test_an_option_without_meaning_is_taken_with_one_warning(flag: str, job_of: JobOf) -> None:
    switch = flag.replace("-", "_") in options.SWITCHES
    for spelling in spellings(flag):
        for words in ([f"{spelling}=false"], [spelling, "false"], *([[spelling]] if switch else [])):
            job = job_of(*words, "train.py", "false")
            assert (job.script, script_args(job)) == ("train.py", ["false"])
            assert len(job.warnings) == 1
            assert spelling in job.warnings[0] and options.DONE_INSTEAD[flag.replace("-", "_")] in job.warnings[0]


def test_the_table_of_options_without_meaning_is_complete() -> None:
    assert set(options.DONE_INSTEAD) == {flag.replace("-", "_") for flag in NVRX["accept"]}
    assert set(options.DONE_INSTEAD) >= options.SWITCHES
