"""`FaultToleranceConfig`: from arguments, YAML and a parser's namespace, and to YAML that the launcher reads."""

from __future__ import annotations

import logging
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ft_client.integrations.nvrx_alias.config import FaultToleranceConfig
from ft_client.integrations.nvrx_alias.peer.fault_tolerance import launcher
from ft_client.rank_monitor_client import SettingsInForce
from ft_launcher.settings import sources
from ft_launcher.settings.command_line import parse
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import from_json


def written(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text)
    return str(file)


def test_its_defaults_are_ours_and_its_values_are_read_as_the_launcher_reads_them() -> None:
    config = FaultToleranceConfig()
    assert config.rank_heartbeat_timeout == MonitorSettings().rank_heartbeat_timeout
    config = FaultToleranceConfig(
        rank_section_timeouts={"step": "180"},
        rank_termination_signal="SIGTERM",
        log_level=20,
        rank_heartbeat_timeout=None,
    )
    assert config.rank_section_timeouts == {"step": 180.0}
    assert config.rank_termination_signal == signal.SIGTERM
    assert (config.log_level, config.rank_heartbeat_timeout) == (20, None)
    assert FaultToleranceConfig().log_level == logging.INFO
    assert FaultToleranceConfig(log_level="dbg").log_level == logging.DEBUG


def test_what_is_no_setting_is_said_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    for make in (FaultToleranceConfig.from_kwargs, FaultToleranceConfig):
        caplog.clear()
        assert make(safety_factor=3, attrsvc_host="x", skip_section_response=True).safety_factor == 3.0
        assert "ignored: attrsvc_host, skip_section_response" in caplog.text
    with pytest.raises(ConfigError, match="attrsvc_host='x'"):
        FaultToleranceConfig.from_kwargs(False, attrsvc_host="x")


def test_yaml_goes_both_ways_and_the_launcher_reads_it_too(tmp_path: Path) -> None:
    file = written(tmp_path, "a:\n - fault_tolerance: {rank_section_timeouts: {step: 3}, spares: 2, port_range: '1:9'}")
    config = FaultToleranceConfig.from_yaml_file(file)
    assert (config.rank_section_timeouts, config.spares, config.port_range) == ({"step": 3.0}, 2, (1, 9))
    config.to_yaml_file(str(tmp_path / "again.yaml"))
    assert FaultToleranceConfig.from_yaml_file(str(tmp_path / "again.yaml"), ignore_not_recognized=False) == config
    section = sources.yaml_section(str(tmp_path / "again.yaml"), "the test", False)
    assert from_json(MonitorSettings, section, "the test").rank_section_timeouts == {"step": 3.0}


def test_arguments_go_over_the_file_that_they_name(tmp_path: Path) -> None:
    file = written(tmp_path, "fault_tolerance: {safety_factor: 2, rank_heartbeat_timeout: 60}")
    given = Namespace(ft_cfg_path=file, ft_param_rank_heartbeat_timeout="90", ft_spares=None, lr=0.1, ft_unknown=3)
    config = FaultToleranceConfig.from_args(given)
    assert (config.safety_factor, config.rank_heartbeat_timeout, config.spares) == (2.0, 90.0, 0)
    older = Namespace(our_file=file, x_spares=2, ft_spares=5)
    config = FaultToleranceConfig.from_args(older, cfg_file_arg="our_file", ft_args_prefix="x_")
    assert (config.safety_factor, config.spares) == (2.0, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1", "cannot be read"),
        ("other: 1", "has no mapping named `fault_tolerance`"),
        ("fault_tolerance: [1]", "has no mapping named `fault_tolerance`"),
        ("fault_tolerance: {rank_heartbeat_timeout: -1}", "rank_heartbeat_timeout=-1 .*: a limit must be above zero"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        FaultToleranceConfig.from_yaml_file(written(tmp_path, text))


@pytest.mark.parametrize("values", [{"safety_factor": 0}, {"rank_section_timeouts": 3}, {"log_level": "loud"}], ids=str)
def test_bad_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(values)))):
        FaultToleranceConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        *[{"rank_termination_signal": bad} for bad in (None, -999, "not a signal", "")],
        *[{"log_level": bad} for bad in (None, -999, "not a level")],
        {"safety_factor": None},
    ],
    ids=str,
)
def test_what_scripts_of_the_peer_expect_of_bad_values(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(values)))):
        FaultToleranceConfig(**values)


def test_what_they_expect_of_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_key"):
        FaultToleranceConfig.from_kwargs(no_such_key=1, ignore_not_recognized=False)
    file = written(tmp_path, "fault_tolerance: {no_such_key: 1}")
    with pytest.raises(ValueError, match="no_such_key"):
        FaultToleranceConfig.from_yaml_file(file, ignore_not_recognized=False)
    with pytest.raises(ValueError, match="has no mapping named"):
        FaultToleranceConfig.from_yaml_file(written(tmp_path, "other: 1"))


def test_only_what_was_set_is_written(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = FaultToleranceConfig(spares=0)
    config.log_level = logging.FATAL
    config.rank_termination_signal = signal.SIGUSR2
    config.rank_section_timeouts["step"] = 3.0
    config.to_yaml_file(str(file))
    section = sources.yaml_section(str(file), "the test", False)
    assert set(section) == {"spares", "log_level", "rank_termination_signal", "rank_section_timeouts"}
    assert FaultToleranceConfig.from_yaml_file(str(file)) == config
    FaultToleranceConfig().to_yaml_file(str(file))
    assert sources.yaml_section(str(file), "the test", False) == {}


def test_defaults_under_the_alias_hold_beside_such_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    FaultToleranceConfig(rank_heartbeat_timeout=9.0).to_yaml_file(str(file))
    parsed = parse(["--ft-alias-nvrx", f"--ft-cfg-path={file}", "train.py"])
    settings = sources.resolve(parsed, {}).settings
    assert (settings.stop.preempted_exit_code, settings.monitor.rank_heartbeat_timeout) == (0, 9.0)


def test_the_client_writes_the_settings_in_force(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    in_force = MonitorSettings(rank_heartbeat_timeout=9.0, rank_section_timeouts={"step": 3.0})
    SettingsInForce(**vars(in_force)).to_yaml_file(str(file))
    found = FaultToleranceConfig.from_yaml_file(str(file))
    assert found == FaultToleranceConfig(rank_heartbeat_timeout=9.0, rank_section_timeouts={"step": 3.0})


def test_the_parser_of_the_launcher() -> None:
    words = ["--ft-safety-factor", "3", "--ft-rank-termination-signal", "SIGUSR2", "train.py"]
    config = FaultToleranceConfig.from_args(launcher.get_args_parser().parse_args(words))
    assert (config.safety_factor, config.rank_termination_signal) == (3.0, signal.SIGUSR2)
