"""`LaunchConfig`: torch's fields and every setting of ours as keywords; what `launch` refuses; a lazy package."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig as TorchLaunchConfig

from ft_launcher import LaunchConfig, job_memory, launch
from ft_launcher.job_memory import memory_key
from ft_launcher.node.processes.signals import SignalPipe
from ft_launcher.python_api import job_of
from ft_launcher.settings import options
from rank_monitor.contract.errors import ConfigError
from tests.program import python


def train(*args: Any) -> int:
    """An entry point."""
    return len(args)


@pytest.fixture(autouse=True)
def clean(folder: Path) -> Path:
    """The current folder has `train.py`, and no variable is set."""
    return folder


def test_it_is_torchs_with_defaults_for_one_node() -> None:
    config = LaunchConfig()
    assert isinstance(config, TorchLaunchConfig)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.rdzv_backend) == (1, 1, 1, "c10d")
    assert LaunchConfig(min_nodes=3).max_nodes == 3


def test_torchs_fields_go_by_place_and_by_name() -> None:
    config = LaunchConfig(1, 2, 4, run_id="seven", max_restarts=5, rdzv_endpoint="localhost:0")
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 4)
    assert (config.run_id, config.max_restarts, config.rdzv_endpoint) == ("seven", 5, "localhost:0")


def test_no_setting_has_the_name_of_a_field_of_torch() -> None:
    assert not {field.name for field in fields(TorchLaunchConfig)} & {*options.GROUP_OF, *options.ALIASES}


@pytest.mark.parametrize("key", sorted(options.GROUP_OF))
def test_every_setting_is_a_keyword(key: str) -> None:
    default = getattr(LaunchConfig(), key)
    config = LaunchConfig(**{key: default})
    assert getattr(config, key) == default
    assert config.resolved().sources[key] == "LaunchConfig"


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("rank_heartbeat_timeout", 3, 3.0),
        ("rank_heartbeat_timeout", None, None),
        ("rank_heartbeat_timeout", "none", None),
        ("rank_section_timeouts", {"step": 4, "setup": None}, {"step": 4.0, "setup": None}),
        ("rank_section_timeouts", "step:4", {"step": 4.0}),
        ("preload", ["numpy", "json"], ("numpy", "json")),
        ("rank_termination_signal", signal.SIGUSR1, signal.SIGUSR1),
        ("journal_dir", Path("/tmp/x"), "/tmp/x"),
        ("term_timeout", 7, 7.0),
    ],
)
def test_values_are_read_as_anywhere_else(key: str, value: Any, read: Any) -> None:
    assert getattr(LaunchConfig(**{key: value}), key) == read


def test_attributes_can_be_set_and_are_checked() -> None:
    config = LaunchConfig()
    config.rank_heartbeat_timeout = "12"
    config.max_restarts = 9
    assert (config.rank_heartbeat_timeout, config.max_restarts) == (12.0, 9)
    with pytest.raises(ConfigError, match="rank_heartbeat_timeout='soon'"):
        config.rank_heartbeat_timeout = "soon"
    assert config.rank_heartbeat_timeout == 12.0
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = config.no_such_thing


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'rank_heartbeat_timeut' \(did you mean rank_heartbeat_timeout\?\)"):
        LaunchConfig(rank_heartbeat_timeut=3)
    with pytest.raises(TypeError, match=r"did you mean nproc_per_node\?"):
        LaunchConfig(nprocs_per_node=3)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"rank_heartbeat_timeout": -1}, "rank_heartbeat_timeout=-1 .from LaunchConfig.: a limit must be above zero"),
        ({"node_beat": 20, "node_timeout": 10}, "must be below node_timeout"),
        ({"warm_start": "maybe"}, "must be one of auto, on, off"),
    ],
)
def test_a_wrong_value_is_refused_at_once(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LaunchConfig(**keywords)


def test_keywords_win_over_environment_and_yaml(monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    (clean / "job.yaml").write_text("fault_tolerance: {rank_heartbeat_timeout: 1, safety_factor: 2, log_level: ERROR}")
    monkeypatch.setenv("FT_SAFETY_FACTOR", "3")
    monkeypatch.setenv("FT_LOG_LEVEL", "DEBUG")
    config = LaunchConfig(cfg_path=clean / "job.yaml", log_level="WARNING")
    assert (config.rank_heartbeat_timeout, config.safety_factor, config.log_level) == (1.0, 3.0, "WARNING")


@pytest.mark.skipif(
    "shutdown_timeout" not in {field.name for field in fields(TorchLaunchConfig)}, reason="not in this torch"
)
def test_torchs_shutdown_timeout_is_the_lowest_source(monkeypatch: pytest.MonkeyPatch) -> None:
    default = LaunchConfig().workers_stop_timeout
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "21")
    assert LaunchConfig().workers_stop_timeout == 21 != default
    assert LaunchConfig(shutdown_timeout=22).workers_stop_timeout == 22
    assert LaunchConfig(shutdown_timeout=22, workers_stop_timeout=23).workers_stop_timeout == 23


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"nproc_per_node": 0}, "at least one rank"),
        ({"max_restarts": -1}, "must not be negative"),
        ({"min_nodes": 3, "max_nodes": 2}, "MIN not above MAX"),
        ({"start_method": "thread"}, "must be one of spawn, fork, forkserver"),
        ({"rdzv_backend": "c10"}, r"not a rendezvous backend \(did you mean c10d\?\)"),
        ({"rdzv_configs": {"join_timeout": 0}}, "join_timeout must be above 0"),
        ({"min_nodes": 2, "max_nodes": 2, "rdzv_backend": "static", "spares": 1}, "no room for spares"),
        ({"min_nodes": 3, "max_nodes": 4, "segment": 2}, "not a multiple of it"),
        ({"dry_run": True}, "only the command"),
        ({"warm_start": "on", "start_method": "fork"}, "goes with start_method='spawn' only"),
    ],
)
def test_what_cannot_be_launched_is_said_before(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        launch(train, LaunchConfig(**keywords))()
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_what_cannot_travel_is_said_before() -> None:
    secret = object()
    with pytest.raises(ConfigError, match=r"function='.*<lambda>'.*cannot be sent.*start_method='fork'"):
        launch(lambda: secret, LaunchConfig())()
    with pytest.raises(ConfigError, match=r"arguments=.*cannot be sent"):
        launch(os.path.join, LaunchConfig(start_method="forkserver"))("a", lambda: secret)
    assert job_of(lambda: secret, (), LaunchConfig(start_method="fork")).script.endswith("<lambda>")


def test_wrong_kinds_of_things_are_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a LaunchConfig, not dict"):
        launch(train, {"nproc_per_node": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a function or a path, not int"):
        launch(3, LaunchConfig())  # type: ignore[arg-type]


def test_torchs_own_class_will_do(monkeypatch: pytest.MonkeyPatch, clean: Path) -> None:
    specs = DefaultLogsSpecs(str(clean / "logs"), tee={1: Std.OUT})
    theirs = TorchLaunchConfig(
        2, 4, 3, rdzv_backend="c10d", rdzv_endpoint="host:1234", rdzv_configs={"rank": 1, "read_timeout": 7},
        run_id="seven", max_restarts=5, start_method="fork", logs_specs=specs, log_line_prefix_template="[${rank}]",
    )  # fmt: skip
    monkeypatch.setenv("FT_RANK_HEARTBEAT_TIMEOUT", "77")
    ours = LaunchConfig.of(theirs)
    assert {field.name: getattr(ours, field.name) for field in fields(theirs)} == vars(theirs)
    assert ours.rank_heartbeat_timeout == 77.0
    assert LaunchConfig.of(ours) is ours
    job = job_of(os.getcwd, (), ours)
    assert (job.launch_config.run_id, job.launch_config.max_restarts) == ("seven", 5)
    assert (job.log_dir, job.tee) == (str(clean / "logs"), {1: Std.OUT})


def test_a_torch_config_that_this_launcher_cannot_take_is_refused_before() -> None:
    with pytest.raises(ConfigError, match="start_method"):
        launch(os.getcwd, TorchLaunchConfig(1, 1, 1, rdzv_backend="c10d", start_method="thread"))()


def test_a_script_is_told_from_a_command() -> None:
    for entrypoint, args in (("train.py", ("a", 1)), (sys.executable, ("-u", "train.py", "a", 1))):
        job = job_of(entrypoint, args, LaunchConfig())
        assert (job.entrypoint, job.args) == (sys.executable, ("-u", "train.py", "a", "1"))
        assert job.script == "train.py" and job.is_script
    assert not job_of("/bin/echo", ("a",), LaunchConfig()).is_script
    with pytest.raises(ConfigError, match="no such file"):
        job_of("missing.py", (), LaunchConfig())


def test_a_job_is_made_of_copies() -> None:
    config = LaunchConfig(nproc_per_node=2)
    job = job_of(functools.partial(os.path.join, "a"), ("b",), config)
    job.launch_config.rdzv_configs["x"] = job.launch_config.rdzv_backend = "y"
    assert "x" not in config.rdzv_configs and config.rdzv_backend == "c10d" and not config.run_id
    assert job.entrypoint.__name__ == "join" and job.script == "posixpath:join" and job.command == [job.script]


def test_torchs_log_specifications_become_ours(clean: Path) -> None:
    specs = DefaultLogsSpecs(str(clean / "logs"), redirects=Std.ALL, tee={1: Std.OUT}, local_ranks_filter={1})
    job = job_of(os.getcwd, (), LaunchConfig(logs_specs=specs))
    assert (job.log_dir, job.redirects, job.tee) == (str(clean / "logs"), Std.ALL, {1: Std.OUT})
    assert job.local_ranks_filter == {1} and job.logs_specs_name is None
    assert job_of(os.getcwd, (), LaunchConfig()).log_dir is None


def test_the_package_is_lazy() -> None:
    code = (
        "import sys, ft_launcher; assert 'torch' not in sys.modules; assert 'launch' in dir(ft_launcher);"
        "from ft_launcher import EtcdServer, LaunchConfig, launch; assert 'torch' in sys.modules;"
        "from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer as E; assert E is EtcdServer"
    )
    python(code, limit_s=120)


def key(function: Callable[..., Any] | str, *args: Any, **config: Any) -> str:
    """What tells the state in memory of a run from that of other runs."""
    return memory_key(job_of(function, args, LaunchConfig(**config)))


def test_the_state_in_memory_of_a_function_is_that_of_its_arguments_and_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = key(train, {"lr": 1})
    assert own == key(train, {"lr": 1}) == key(train, {"lr": 1}, start_method="fork")
    others = [key(train, {"lr": 2}), key(functools.partial(train, 1), {"lr": 1}), key(os.path.join, {"lr": 1})]
    monkeypatch.setattr(sys, "argv", ["another.py"])
    others.append(key(train, {"lr": 1}))
    assert len({own, *others}) == 5


def test_without_a_run_id_each_machine_has_a_key_of_its_own_on_shared_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that differ in their environment variables alone must not load each other's state."""
    keys = []
    for host in ("one", "other"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        keys.append([job_memory.keys_on_storage(job_of(train, ({},), LaunchConfig(run_id=of))) for of in ("", "7")])
    assert keys[0][0] != keys[1][0] and keys[0][0][1] == keys[1][0][1]
    assert keys[0][1] == keys[1][1]


def test_the_end_reads_the_signals_while_a_state_is_written() -> None:
    """`EndLimit` takes a launcher that reads none for one that stands still, and ends it."""
    signals = SignalPipe([signal.SIGUSR1])
    try:
        ends_at = job_memory.end_time(job_of(train, ({},), LaunchConfig()), signals, math.inf)
        assert ends_at() == math.inf
        signals.read_at = -math.inf
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ends_at() < math.inf
        assert signals.read_at > -math.inf and signals.arrived == [signal.SIGUSR1]
    finally:
        signals.close()


def test_a_function_that_cannot_be_told_from_others_begins_without_state_in_memory() -> None:
    def forked() -> None:
        pass

    assert key(forked, start_method="fork") != key(forked, start_method="fork")
    assert key(forked, start_method="fork", run_id="7") == key(train, run_id="7")


def test_in_a_folder_that_is_gone_a_run_begins_without_state_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert key(train, start_method="fork") != key(train, start_method="fork")
