"""The job: torch's `LaunchConfig` as torchrun would make it, the command of a rank, logs, and what torch refuses."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.run import get_args_parser

from ft_launcher.settings.job_settings import Job
from rank_monitor.contract.errors import ConfigError

JobOf = Callable[..., Job]
V3 = "--rdzv-backend etcd-v3 --rdzv-endpoint localhost:1"


def torchrun_would_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[str]]:
    told: list[tuple[Any, Any, list[str]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            torch_run, "elastic_launch", lambda config, entrypoint: lambda *a: told.append((config, entrypoint, [*a]))
        )
        torch_run.main(words)
    return told[0]


@pytest.mark.parametrize(
    "line",
    [
        "train.py a",
        "--nproc-per-node 2 -m json.tool a",
        "--standalone --max-restarts 3 train.py",
        "--nnodes 2 --node-rank 1 --master-addr localhost --master-port 6000 train.py",
        "--nnodes 1 --master-port 6000 train.py",
        "--nnodes 2:3 --rdzv-backend c10d --rdzv-endpoint localhost:1 --rdzv-conf join_timeout=3,is_host=1 train.py",
        "--rdzv-id 7 --role trainer --monitor-interval 2 --signals-to-handle SIGTERM train.py",
    ],
)
def test_the_config_is_what_torchrun_would_launch(line: str, job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(*line.split())
    takes_29500 = get_args_parser().get_default("master_port") and not {"--standalone", "--nnodes"} & set(line.split())
    alone = ["--standalone"] if takes_29500 else []  # torch 2.6, where later releases take a free port
    config, entrypoint, words = torchrun_would_launch([*alone, *line.split()], monkeypatch)
    # Of a job of one node torch makes up an id, in place of one that the user gave; ours stays.
    per_run = {"logs_specs", "run_id" if config.rdzv_endpoint == "localhost:0" else ""}
    for field in fields(config):
        if field.name not in per_run:
            assert getattr(job.launch_config, field.name) == getattr(config, field.name), field.name
    assert job.entrypoint == entrypoint
    assert list(job.args) == words


@pytest.mark.parametrize(
    ("line", "name", "folder_name"),
    [
        ("--ft-job-name mine train.py", "mine", "mine"),
        ("--ft-job-name mine --rdzv-id 7 train.py", "mine", "mine"),
        ("--rdzv-id exp42 train.py", "train-exp42", "exp42"),
        ("--rdzv-id exp42 -m json.tool", "json.tool-exp42", "exp42"),
        ("--rdzv-id exp42 --no-python sh -c true", "sh-exp42", "exp42"),
        (f"--rdzv-id exp42 --nnodes 2 {V3} train.py", "train-exp42", "exp42"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py", "train-29400", "train-29400"),
        ("--nnodes 2 --master-addr host --master-port 6000 train.py", "train-6000", "train-6000"),
    ],
)
def test_the_name_of_a_job(line: str, name: str, folder_name: str, job_of: JobOf) -> None:
    job = job_of(*line.split())
    assert (job.name, job.folder_name) == (name, folder_name)


@pytest.mark.parametrize("line", ["train.py", "--standalone train.py"])
def test_a_job_without_a_name_has_one_of_its_own(line: str, job_of: JobOf) -> None:
    one, other = job_of(*line.split()), job_of(*line.split())
    assert re.fullmatch(r"train-[0-9a-f]{6}", one.name) and one.folder_name == one.name != other.name
    assert one.launch_config.run_id.startswith(one.name.removeprefix("train-"))


@pytest.mark.parametrize("line", ["train.py", "--nnodes 1 --master-port 6000 train.py", "--nproc-per-node 2 train.py"])
def test_the_id_of_a_job_of_one_node_is_kept(line: str, job_of: JobOf) -> None:
    """Torch replaces it where it takes a free port; with `--standalone` it is said to be dropped."""
    assert job_of("--rdzv-id", "exp42", *line.split()).launch_config.run_id == "exp42"


def test_commands(job_of: JobOf, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("train.py", "--lr", "1")
    assert (job.entrypoint, job.args) == (sys.executable, ("-u", "train.py", "--lr", "1"))
    assert (job.script, job.no_python) == ("train.py", False)
    job = job_of("-m", "pytest", "-x")
    assert (job.script, job.args) == ("-m pytest", ("-u", "-m", "pytest", "-x"))
    job = job_of("--no-python", "sh", "-c", "true")
    assert (job.entrypoint, job.args, job.no_python) == ("sh", ("-c", "true"), True)
    job = job_of("--run-path", "--no-python", str(folder / "train.py"), "a")
    assert (job.entrypoint, job.args) == (sys.executable, ("-u", str(folder / "train.py"), "a"))
    assert not job.no_python
    monkeypatch.setenv("PYTHON_EXEC", "/bin/sh")
    job = job_of("in/the/container.py")
    assert (job.entrypoint, job.args) == ("/bin/sh", ("-u", "in/the/container.py"))
    monkeypatch.setenv("PYTHON_EXEC", "/no/python")
    with pytest.raises(ConfigError, match="from PYTHON_EXEC"):
        job_of("train.py")


def test_logs_are_kept_as_given_and_no_folder_is_made(job_of: JobOf, folder: Path) -> None:
    before = sorted(folder.iterdir())
    job = job_of("--log-dir", "logs", "--tee", "0:3,10:1", "-r", "2", "--local-ranks-filter", "0,12", "train.py")
    assert job.tee == {0: Std.ALL, 10: Std.OUT}
    assert job.redirects == Std.ERR
    assert job.local_ranks_filter == {0, 12}
    assert (job.log_dir, job.logs_specs_name) == ("logs", None)
    assert isinstance(job.launch_config.logs_specs, DefaultLogsSpecs)
    assert sorted(folder.iterdir()) == before


class MyLogs(DefaultLogsSpecs):  # type: ignore[misc]
    """What a user's entry point would name."""


def test_the_users_own_log_specs_are_honoured(job_of: JobOf, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str | None] = []

    def load(name: str | None) -> type[MyLogs]:
        named.append(name)
        return MyLogs

    monkeypatch.setattr(torch_run, "_get_logs_specs_class", load)
    job = job_of("--logs-specs", "mine", "--tee", "0:3", "--log-dir", str(folder / "logs"), "train.py")
    assert (job.logs_specs_name, named) == ("mine", ["mine"])
    assert type(job.launch_config.logs_specs) is MyLogs
    assert job.launch_config.logs_specs._tee == {0: Std.ALL}


def test_stop_timeout_of_torch_is_the_lowest_source(job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_of("train.py").settings.stop.workers_stop_timeout == 15
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert job_of("train.py").settings.stop.workers_stop_timeout == 7
    job = job_of("--shutdown-timeout", "4", "train.py")
    assert (job.settings.stop.workers_stop_timeout, job.sources["workers_stop_timeout"]) == (4, "--shutdown-timeout")
    job = job_of("--workers-stop-timeout", "2", "--shutdown-timeout", "4", "train.py")
    assert (job.settings.stop.workers_stop_timeout, job.sources["workers_stop_timeout"]) == (
        2,
        "--workers-stop-timeout",
    )
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="from TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        job_of("train.py")


def test_threads_are_said_once_in_one_line(
    job_of: JobOf, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of("--nproc-per-node", "2", "train.py")
    assert [warning for warning in job.warnings if "OMP_NUM_THREADS" in warning] == list(job.warnings)
    assert len(job.warnings) == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "OMP" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(("nodes", "words"), [("1", "in a job of one node"), ("2", "in-process wrapper")])
def test_min_healthy_is_warned_of(job_of: JobOf, nodes: str, words: str) -> None:
    job = job_of("--nnodes", nodes, "--ft-restart-policy", "min-healthy", "train.py")
    assert [warning for warning in job.warnings if "min-healthy" in warning and words in warning]


def test_standalone_wins_and_says_so(job_of: JobOf) -> None:
    job = job_of("--standalone", "--rdzv-endpoint", "elsewhere:1", "--rdzv-id", "7", "train.py")
    assert (job.launch_config.rdzv_backend, job.launch_config.rdzv_endpoint) == ("c10d", "localhost:0")
    assert job.warnings == ("--standalone wins: --rdzv-endpoint, --rdzv-id is not used",)
    assert not job_of("--standalone", "--rdzv-backend", "c10d", "train.py").warnings


C10D = "--rdzv-backend c10d --rdzv-endpoint localhost:1"
FREE_PORT = "the ranks' store gets an address and a free port in each cycle"


@pytest.mark.parametrize(
    ("line", "unused"),
    [
        (f"--nnodes 2 {C10D} --node-rank 1", {}),
        (f"--nnodes 2 {V3} --node-rank 1 --ft-node-timeout 9 --ft-scale up", {}),
        ("--nnodes 2 --node-rank 1 --master-addr localhost --master-port 6000", {}),
        (f"--nnodes 1 {C10D} --node-rank 0", {}),
        (f"--nnodes 1 {C10D} --node-rank 1", {"--node-rank": "the job has one node"}),
        (
            f"--nnodes 2 {C10D} --master-addr localhost --master-port 6000",
            {"--master-addr": FREE_PORT, "--master-port": FREE_PORT},
        ),
        ("--standalone --master-port 6000", {"--master-port": FREE_PORT}),
        ("--nnodes 2 --rdzv-endpoint localhost:1 --master-port 6000", {"--master-port": "--rdzv-endpoint says"}),
        (
            "--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint localhost:1 --node-rank 1"
            " --ft-node-timeout 9 --ft-restart-policy min-healthy",
            {
                "--node-rank": "its own handler",
                "--ft-node-timeout": "its own handler",
                "--ft-restart-policy": "its own handler",
            },
        ),
    ],
)
def test_an_option_without_effect_in_a_backend_says_so(
    line: str, unused: dict[str, str], job_of: JobOf, caplog: pytest.LogCaptureFixture
) -> None:
    told = [warning for warning in job_of(*line.split(), "train.py").warnings if "has no effect" in warning]
    assert [warning.split()[0] for warning in told] == list(unused)
    assert all(why in warning for why, warning in zip(unused.values(), told, strict=True))
    assert "only used for static" not in caplog.text


def test_the_node_rank_goes_to_the_rendezvous(job_of: JobOf) -> None:
    config = job_of(*f"--nnodes 2 {C10D} --node-rank 1 train.py".split()).launch_config
    assert config.rdzv_configs["rank"] == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--nproc-per-node 0 train.py", "nproc_per_node='0'"),
        ("--nproc-per-node -1 train.py", "nproc_per_node='-1'"),
        ("--nproc-per-node many train.py", "nproc_per_node='many'"),
        ("--nproc-per-node xpu train.py", "nproc_per_node='xpu'"),
        ("--nnodes 0 train.py", "nnodes='0'"),
        ("--nnodes 3:2 train.py", "nnodes='3:2'"),
        ("--nnodes 1:2:3 train.py", "nnodes='1:2:3'"),
        ("--nnodes x train.py", "nnodes='x'"),
        ("--max-restarts -1 train.py", "max_restarts=-1"),
        ("--monitor-interval 0 train.py", "monitor_interval=0.0"),
        ("--monitor-interval nan train.py", "monitor_interval=nan"),
        ("--master-port 70000 train.py", "master_port=70000"),
        ("--nnodes 2 --node-rank 2 train.py", "node_rank=2"),
        ("--nnodes 2 --node-rank -1 train.py", "node_rank=-1"),
        ("--standalone --nnodes 2 train.py", "--standalone is for one node"),
        ("--no-python -m json", "exclude each other"),
        ("--tee 4 train.py", "tee='4'"),
        ("--redirects 0:9 train.py", "redirects='0:9'"),
        ("--local-ranks-filter 0,x train.py", "local_ranks_filter='0,x'"),
        ("--rdzv-backend c10 train.py", "did you mean c10d?"),
        ("--rdzv-backend c10d --rdzv-endpoint host:port train.py", "rdzv_endpoint='host:port'"),
        ("--rdzv-conf join_timeout train.py", "rdzv_conf='join_timeout'"),
        ("--rdzv-backend c10d --rdzv-conf join_timeout=x train.py", "join_timeout"),
        ("--rdzv-backend c10d --rdzv-conf join_timeout=0 train.py", "join_timeout must be above 0"),
        ("--rdzv-backend c10d --rdzv-conf is_host=maybe train.py", "is_host"),
        ("--rdzv-conf min_nodes=3 train.py", "min_nodes: there is an option of its own"),
        (f"{V3} --rdzv-conf protocol=ftp train.py", "protocol must be http or https"),
        (f"{V3} --rdzv-conf read_timeout=0 train.py", "read_timeout must be above 0"),
        (f"{V3} --rdzv-conf ssl_cert=/no/file train.py", "ssl_cert=/no/file: no such file"),
        (f"{V3} --rdzv-conf ssl_cert_key=train.py train.py", "ssl_cert_key needs ssl_cert"),
        ("--rdzv-backend etcd-v3 --rdzv-endpoint h:port train.py", "rdzv_endpoint='h:port'"),
        ("--rdzv-backend etcd-v3 --rdzv-endpoint h:1,http://h:2 train.py", "rdzv_endpoint='h:1,http://h:2'"),
        ("--logs-specs none-such train.py", "none-such"),
    ],
)
def test_what_torch_would_refuse_is_refused_with_a_reason(line: str, says: str, job_of: JobOf) -> None:
    with pytest.raises(ConfigError) as error:
        job_of(*line.split())
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["train.py", "--nnodes 1 train.py", "--node-rank 0 --master-addr localhost train.py"])
def test_one_node_without_a_chosen_port_takes_a_free_one(line: str, job_of: JobOf) -> None:
    config = job_of(*line.split()).launch_config
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "localhost:0")
    assert job_of(*line.split()).launch_config.run_id != config.run_id


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ("--master-port 29500 train.py", "127.0.0.1:29500"),
        ("--nnodes 2 --master-addr localhost train.py", "localhost:29500"),
        ("--nnodes 1:2 train.py", "127.0.0.1:29500"),
        ("--rdzv-endpoint localhost:7 train.py", "localhost:7"),
    ],
)
def test_a_static_rendezvous_has_the_port_that_torchrun_documents(line: str, endpoint: str, job_of: JobOf) -> None:
    config = job_of(*line.split()).launch_config
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", endpoint)


@pytest.mark.parametrize(
    ("backend", "module", "problem"),
    [
        ("etcd", "etcd", "python-etcd.*pip install python-etcd; etcd 3.6 and later need --rdzv-backend=etcd-v3"),
        ("etcd-v2", "etcd", "python-etcd.*pip install python-etcd; etcd 3.6 and later need --rdzv-backend=etcd-v3"),
        ("etcd-v3", "etcd3gw", r"etcd3gw.*pip install 'ft-launcher\[etcd\]'"),
    ],
)
def test_a_backend_whose_package_is_missing(
    backend: str, module: str, problem: str, job_of: JobOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"needs the package {problem}"):
        job_of("--rdzv-backend", backend, "train.py")


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("--nnodes=1:2 --rdzv-endpoint=localhost:1 --ft-alias-nvrx", "c10d"),
        ("--nnodes=2 --rdzv-endpoint=localhost:1", "static"),
        ("--nnodes=2 --rdzv-endpoint=localhost:1 --ft-alias-nvrx --node-rank=1", "static"),
        ("--nnodes=2 --rdzv-endpoint=localhost:1 --ft-alias-nvrx --rdzv-backend=static", "static"),
        ("--nnodes=2 --master-addr=localhost --ft-alias-nvrx", "static"),
    ],
)
def test_nvidias_default_backend_under_the_alias(line: str, backend: str, job_of: JobOf) -> None:
    job = job_of(*line.split(), "train.py")
    assert job.launch_config.rdzv_backend == backend
    assert sum("the default of NVIDIA's launcher" in warning for warning in job.warnings) == (backend == "c10d")
