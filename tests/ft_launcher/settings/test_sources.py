"""Where settings come from: which source wins, what `none` and `default` do, and what is said about wrong ones."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest

from ft_launcher.settings import options
from ft_launcher.settings.command_line import Parsed
from ft_launcher.settings.sources import Resolved, resolve
from rank_monitor.contract.errors import ConfigError


def resolved(texts: Mapping[str, str], environ: Mapping[str, str] | None = None, **torchs: object) -> Resolved:
    spelled = {key: options.flag_of(key) for key in texts}
    return resolve(Parsed(Namespace(**torchs), texts, spelled, frozenset(torchs)), environ or {})


def yaml_of(folder: Path, text: str) -> dict[str, str]:
    (folder / "job.yaml").write_text(text)
    return {"cfg_path": str(folder / "job.yaml")}


def test_defaults_alone() -> None:
    found = resolved({})
    assert found.settings.monitor.rank_heartbeat_timeout == 2700
    assert set(found.sources.values()) == {"default"}
    assert not found.warnings


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "fault_tolerance: {safety_factor: 2, connect_timeout: 2, stall_warning: 2}")
    environ = {"FT_CONNECT_TIMEOUT": "3", "FT_STALL_WARNING": "3", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    found = resolved({**path, "stall_warning": "4"}, environ)
    monitor = found.settings.monitor
    assert (monitor.safety_factor, monitor.connect_timeout, monitor.stall_warning) == (2, 3, 4)
    assert found.settings.stop.workers_stop_timeout == 7
    assert resolved({}, environ, shutdown_timeout=1).settings.stop.workers_stop_timeout == 1
    sources = {key: found.sources[key] for key in ("safety_factor", "connect_timeout", "stall_warning")}
    assert sources == {
        "safety_factor": path["cfg_path"],
        "connect_timeout": "FT_CONNECT_TIMEOUT",
        "stall_warning": "--ft-stall-warning",
    }


@pytest.mark.parametrize("word", ["none", "null", "None", "", " "])
def test_none_overrides_a_lower_source(word: str) -> None:
    found = resolved({"rank_heartbeat_timeout": word}, {"FT_RANK_HEARTBEAT_TIMEOUT": "5"})
    assert found.settings.monitor.rank_heartbeat_timeout is None
    assert found.sources["rank_heartbeat_timeout"] == "--ft-rank-heartbeat-timeout"


def test_default_overrides_a_lower_source() -> None:
    found = resolved(
        {"rank_heartbeat_timeout": "default", "status_address": "default"},
        {"FT_RANK_HEARTBEAT_TIMEOUT": "5", "FT_STATUS_ADDRESS": "0.0.0.0"},
    )
    assert found.settings.monitor.rank_heartbeat_timeout == 2700
    assert found.settings.record.status_address == "127.0.0.1"


def test_none_where_there_is_none_is_said() -> None:
    found = resolved({"workers_stop_timeout": "none"})
    assert found.settings.stop.workers_stop_timeout == 15
    assert "workers_stop_timeout" in found.warnings[0]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rank_section_timeouts", " setup : 600 , step:180,save:none", {"setup": 600.0, "step": 180.0, "save": None}),
        ("backoff", "1:30", (1.0, 30.0)),
        ("backoff", "0", (0.0, 0.0)),
        ("backoff", "none", (0.0, 0.0)),
        ("port_range", "20000:20100", (20000, 20100)),
        ("no_restart_exit_codes", "3,17", (3, 17)),
        ("preload", "numpy, torch", ("numpy", "torch")),
        ("metrics_port", "off", None),
        ("metrics_port", "9100", 9100),
        ("log_level", "warn", "WARNING"),
        ("log_level", "10", "DEBUG"),
        ("stack_signal", "SIGRTMIN+3", 37),
        ("rank_termination_signal", "term", 15),
        ("dump_stacks", "NO", False),
        ("restart_policy", "Min-Healthy", "min-healthy"),
    ],
)
def test_forms_of_values(key: str, text: str, value: object) -> None:
    settings = resolved({key: text}).settings
    (group,) = (group for group in vars(settings).values() if hasattr(group, key))
    assert getattr(group, key) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rank_heartbeat_timeout", "soon"),
        ("rank_heartbeat_timeout", "-1"),
        ("rank_heartbeat_timeout", "0"),
        ("rank_heartbeat_timeout", "nan"),
        ("rank_heartbeat_timeout", "inf"),
        ("termination_grace_time", "-1"),
        ("safety_factor", "0.5"),
        ("num_warmup_iterations", "1.5"),
        ("dump_stacks", "maybe"),
        ("rank_section_timeouts", "setup=600"),
        ("rank_section_timeouts", "setup:0"),
        ("backoff", "30:1"),
        ("backoff", "30"),
        ("port_range", "0:70000"),
        ("status_port", "70000"),
        ("no_restart_exit_codes", "0"),
        ("rank_termination_signal", "SIGNOTHING"),
        ("stack_signal", "SIGKILL"),
        ("stack_signal", "SIGTERM"),
        ("preemption_signal", "SIGKILL"),
        ("preemption_signal", "SIGSTOP"),
        ("log_level", "loud"),
        ("restart_policy", "sometimes"),
        ("warm_start", "warm"),
        ("node_beat", "100"),
        ("preempted_exit_code", "256"),
        ("no_restart_exit_code", "-1"),
    ],
)
@pytest.mark.parametrize("of_environment", [False, True])
def test_a_wrong_value_is_an_error_with_key_value_and_source(key: str, text: str, of_environment: bool) -> None:
    name = f"FT_{key.upper()}"
    with pytest.raises(ConfigError) as error:
        resolved({}, {name: text}) if of_environment else resolved({key: text})
    assert key in str(error.value)
    assert (name if of_environment else options.flag_of(key)) in str(error.value)
    assert "\n" not in str(error.value)


def test_zero_is_a_grace_time_and_a_count() -> None:
    settings = resolved({"termination_grace_time": "0", "same_error_limit": "0", "workers_stop_timeout": "0"}).settings
    assert settings.monitor.termination_grace_time == settings.restart.same_error_limit == 0


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_beside_other_settings_is_empty(tmp_path: Path, text: str) -> None:
    path = yaml_of(tmp_path, text)
    assert resolved({**path, "same_error_limit": "7"}).settings.restart.same_error_limit == 7
    assert resolved(path, {"FT_SAME_ERROR_LIMIT": "7"}).settings.restart.same_error_limit == 7
    for alone in ({}, {"allow_unknown_keys": "true"}):
        with pytest.raises(ConfigError, match="has no mapping named"):
            resolved({**path, **alone})


def test_a_file_with_something_else_in_it_is_not_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no mapping named"):
        resolved({**yaml_of(tmp_path, "other: {a: 1}"), "same_error_limit": "7"})


def test_all_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "fault_tolerance: {safety_factor: much, hartbeat: 1}")
    with pytest.raises(ConfigError) as error:
        resolved({**path, "stall_warning": "-4", "safety_factor": "3"}, {"FT_CONNECT_TIMEOUT": "x"})
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    for words in ("hartbeat=1", "safety_factor='much'", "connect_timeout='x'", "stall_warning='-4'"):
        assert any(words in line for line in lines)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FT_RANK_HARTBEAT_TIMEOUT", "FT_RANK_HEARTBEAT_TIMEOUT"),
        ("FT_RANK_HEARTBEAT_TIMEOUTS", "FT_RANK_HEARTBEAT_TIMEOUT"),
        ("FT_SCALES", "FT_SCALE"),
        ("FT_SPARSE", "FT_SPARES"),
        ("FT_TERM_TIMEOUTS", "FT_TERM_TIMEOUT"),
    ],
)
def test_a_variable_that_looks_like_a_setting_is_a_warning(name: str, meant: str) -> None:
    (warning,) = resolved({}, {name: "5", "FT_JOB_TAG": "a", "FT_DEBUG": "1", "OTHER": "x"}).warnings
    assert name in warning and f"did you mean {meant}?" in warning


@pytest.mark.parametrize("name", ["FT_BIN", "FT_HOME", "FT_RESUMED", "FT_", "FT_LIBRARY_PATH", "FT_RANK_HEARTBEAT"])
def test_a_variable_of_another_program_is_none_of_ours(name: str) -> None:
    assert not resolved({}, {name: "5"}).warnings


@pytest.mark.parametrize("name", ["PET_FT_CFG_PATH", "FAULT_TOL_CFG_PATH", "FT_CFG_PATH"])
def test_variables_that_name_the_yaml(name: str, tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "fault_tolerance: {safety_factor: 2}")["cfg_path"]
    assert resolved({}, {name: path}).settings.monitor.safety_factor == 2
    assert resolved({"cfg_path": "none"}, {name: path}).settings.monitor.safety_factor == 5


@pytest.mark.parametrize("name", ["PET_FT_CFG_PATH", "FAULT_TOL_CFG_PATH", "FT_CFG_PATH"])
def test_a_missing_file_named_by_the_environment_is_a_warning(name: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "no.yaml")
    (warning,) = resolved({"safety_factor": "3"}, {name: missing}).warnings
    assert name in warning and missing in warning
    assert resolved({}, {name: f"{yaml_of(tmp_path, '')['cfg_path']}/below.yaml"}).warnings
    assert not resolved({"ignore_missing_cfg": "true"}, {name: missing}).warnings
    with pytest.raises(ConfigError, match="there is no such file"):
        resolved({"cfg_path": missing}, {name: missing})
    with pytest.raises(ConfigError, match="has no mapping"):  # one that is there is meant to be read
        resolved({}, {name: yaml_of(tmp_path, "a: 1")["cfg_path"]})


def test_the_code_of_a_preemption_under_the_alias() -> None:
    code = {"preempted_exit_code": "86"}
    assert resolved({}).settings.stop.preempted_exit_code == 86
    for under in (resolved({"alias_nvrx": "true"}), resolved({}, {"FT_ALIAS_NVRX": "1"})):
        assert under.settings.stop.preempted_exit_code == 0
        assert "alias" in under.sources["preempted_exit_code"]
    assert resolved({"alias_nvrx": "false"}).settings.stop.preempted_exit_code == 86
    assert resolved({"alias_nvrx": "true", **code}).settings.stop.preempted_exit_code == 86
    assert resolved({"alias_nvrx": "true"}, {"FT_PREEMPTED_EXIT_CODE": "7"}).settings.stop.preempted_exit_code == 7


def test_a_setting_that_does_nothing_is_accepted_with_a_warning() -> None:
    found = resolved({"install_exception_hook": "false"})
    assert found.settings.record.install_exception_hook is False
    (warning,) = found.warnings
    assert warning.startswith("install_exception_hook (from ")
    assert warning.endswith("is accepted and does nothing here: these are always reported to the monitor")


YAML_FORMS = """
some: [1, {other: 2}]
deep:
  - {list: yes}
  - fault_tolerance:
      rank-heartbeat-timeout: null
      rank_section_timeouts: {setup: 600, save: none}
      backoff: [1, 30]
      no_restart_exit_codes: 3
      health: off
      term_timeout: 7
      log_level: 20
      dump_stacks: no
      preload: [numpy, scipy]
fault_tolerance_not: {safety_factor: 9}
"""


def test_yaml_forms_at_any_depth(tmp_path: Path) -> None:
    settings = resolved(yaml_of(tmp_path, YAML_FORMS)).settings
    assert settings.monitor.rank_heartbeat_timeout is None
    assert settings.monitor.rank_section_timeouts == {"setup": 600.0, "save": None}
    assert settings.restart.backoff == (1.0, 30.0)
    assert settings.restart.no_restart_exit_codes == (3,)
    assert settings.health.health == "off"
    assert settings.stop.preemption_grace == 7
    assert settings.monitor.log_level == "INFO"
    assert settings.monitor.dump_stacks is False
    assert settings.start.preload == ("numpy", "scipy")


def test_the_first_mapping_counts(tmp_path: Path) -> None:
    text = "a: {fault_tolerance: 3}\nb: {fault_tolerance: {safety_factor: 2}}\nfault_tolerance: {safety_factor: 3}\n"
    assert resolved(yaml_of(tmp_path, text)).settings.monitor.safety_factor == 3
    text = (
        "a: {fault_tolerance: 3}\nb: {fault_tolerance: {safety_factor: 2}}\nc: {fault_tolerance: {safety_factor: 4}}\n"
    )
    assert resolved(yaml_of(tmp_path, text)).settings.monitor.safety_factor == 2


def test_unknown_yaml_keys(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "fault_tolerance: {rank_hartbeat_timeout: 3, safety_factor: 2, 7: x, cfg_path: y}")
    with pytest.raises(ConfigError, match=r"rank_hartbeat_timeout=3.*did you mean rank_heartbeat_timeout\?"):
        resolved(path)
    found = resolved({**path, "allow_unknown_keys": "true"})
    assert found.settings.monitor.safety_factor == 2
    assert len(found.warnings) == 3
    path = yaml_of(tmp_path, "fault_tolerance: {allow_unknown_keys: true, mystery: 3}")
    assert len(resolved(path).warnings) == 1


def test_keys_of_nvidias_launcher_in_yaml_are_taken_with_one_warning_each(tmp_path: Path) -> None:
    found = resolved(yaml_of(tmp_path, "fault_tolerance: {restart_check_interval: 60, skip-section-response: true}"))
    assert len(found.warnings) == 2


NEMO = """
exp_manager:
  create_fault_tolerance_callback: true
  fault_tolerance:
    workload_check_interval: 5.0
    rank_heartbeat_timeout: 600
    calculate_timeouts: true
    safety_factor: 3.0
    rank_termination_signal: SIGKILL
    log_level: INFO
    max_rank_restarts: 2
    max_subsequent_job_failures: 3
    additional_ft_launcher_args: "--ft-stall-warning=60"
    simulated_fault: {fault_type: random, base_delay: 900}
"""


def test_keys_that_programs_around_the_launcher_read(tmp_path: Path) -> None:
    found = resolved(yaml_of(tmp_path, NEMO))
    assert (found.settings.monitor.rank_heartbeat_timeout, found.settings.monitor.safety_factor) == (600, 3)
    named = [warning.split()[0] for warning in found.warnings]
    of_nemo = ["max_rank_restarts", "max_subsequent_job_failures", "additional_ft_launcher_args", "simulated_fault"]
    assert sorted(named) == sorted(["calculate_timeouts", "workload_check_interval", *of_nemo])
    assert all("is accepted and does nothing here: " in warning for warning in found.warnings)
    with pytest.raises(ConfigError, match="max_ranks_restarts"):
        resolved(yaml_of(tmp_path, NEMO.replace("max_rank_", "max_ranks_")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- fault_tolerance: {}\n", "is a list"),
        ("just words", "is a single value"),
        ("a: 1\n", "has no mapping named `fault_tolerance`"),
        ("", "has no mapping named `fault_tolerance`"),
        ("fault_tolerance: [a]\n", "is not a mapping of keys to values"),
        ("a: [\n", "is not YAML"),
        ("a: 1\n---\nb: 1\n", "is not YAML"),
        ("a: &x {b: *x}\n", "has no mapping named"),
        ("[" * 600, "is not YAML"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(yaml_of(tmp_path, text))
    assert says in str(error.value)
    assert "job.yaml" in str(error.value) and "--ft-cfg-path" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such file. .*--ft-ignore-missing-cfg"):
        resolved({"cfg_path": str(tmp_path / "no.yaml")})
    with pytest.raises(ConfigError, match=r"cannot be read: .* is not a regular file"):
        resolved({"cfg_path": str(tmp_path)})
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="is not YAML"):
        resolved({"cfg_path": str(tmp_path / "bytes.yaml")})


def test_a_missing_file_or_mapping_can_be_ignored(tmp_path: Path) -> None:
    ignore = {"ignore_missing_cfg": "true"}
    assert not resolved({"cfg_path": str(tmp_path / "no.yaml"), **ignore}).warnings
    assert not resolved({**yaml_of(tmp_path, "a: 1"), **ignore}).warnings
    assert not resolved(yaml_of(tmp_path, "fault_tolerance:\n")).warnings
    with pytest.raises(ConfigError, match="is a list"):
        resolved({**yaml_of(tmp_path, "[1]"), **ignore})
