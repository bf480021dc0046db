"""The program: order of its steps, its subcommands, dry run and exit codes, with a launcher that only tells."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import ft_launcher
from ft_launcher import cli
from ft_launcher.node.ranks import runtime
from ft_launcher.settings.job_settings import Job
from rank_monitor.contract.errors import FtError
from tests.ft_launcher.conftest import main, needs


@dataclass
class FakeLauncher:
    """Stands in for the runtime and for `ft_launcher.composition`: notes what happens to it."""

    code: int = 0
    fails: BaseException | None = None
    tag: str = "tag"
    events: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def start(self) -> FakeLauncher:
        self.events.append("start")
        return self

    def run(self, job: Job, runtime: FakeLauncher, zygotes: object) -> int:
        self.events.append("run")
        self.jobs.append(job)
        if self.fails is not None:
            raise self.fails
        return self.code

    def close(self) -> None:
        self.events.append("close")


@pytest.fixture
def launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    fake = FakeLauncher()
    module: Any = types.ModuleType("ft_launcher.composition")
    module.run = fake.run
    monkeypatch.setitem(sys.modules, "ft_launcher.composition", module)
    monkeypatch.setattr(runtime, "Runtime", fake)
    return fake


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert isinstance(exited.value.code, int)
    return exited.value.code


def test_a_job_runs_between_start_and_close(launcher: FakeLauncher) -> None:
    launcher.code = 7
    assert exit_code("--max-restarts", "2", "train.py") == 7
    assert launcher.events == ["start", "run", "close"]
    assert launcher.jobs[0].launch_config.max_restarts == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (FtError("no room"), 80), (RuntimeError("a bug"), 80)],
    ids=["Ctrl-C", "error of ours", "bug"],
)
def test_whatever_happens_the_runtime_is_closed(launcher: FakeLauncher, error: BaseException, code: int) -> None:
    launcher.fails = error
    assert exit_code("train.py") == code
    assert launcher.events[-1] == "close"


def test_a_wrong_line_ends_with_2_and_closes(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--nproc-per-node", "2", "--tee", "9", "train.py") == 2
    assert launcher.events == ["start", "close"]
    assert re.match(r"\d\d:\d\d:\d\d ft_launcher: tee='9' \(from --tee\): ", capsys.readouterr().err)


def test_a_dry_run_prints_and_starts_nothing(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--ft-dry-run --nproc-per-node 2 --ft-rank-section-timeouts=setup:600 --max-restarts 3 train.py --lr 1"
    assert exit_code(*line.split()) == 0
    assert launcher.events == []
    text, warnings = capsys.readouterr()
    assert text.count("/ft_client/bootstrap.py train.py --lr 1") == 2
    for words in (
        "LOCAL_RANK=1",
        "WORLD_SIZE=2",
        "OMP_NUM_THREADS=1",
        "start: fork of one import of torch",
        "limit section setup: 600 s",
    ):
        assert words in text
    assert warnings.startswith("ft_launcher: OMP_NUM_THREADS=1 in each of the 2 ranks")


def test_a_dry_run_that_only_a_variable_asks_for(launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DRY_RUN", "yes")
    assert exit_code("train.py") == 0
    assert "run" not in launcher.events


def test_a_dry_run_shows_what_a_program_gets_whose_output_is_read(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    watched = ("--ft-dry-run", "--ft-watch-log=tqdm", "--ft-watch-log-timeout=60")
    assert exit_code(*watched, "--no-python", "true") == 0
    text = capsys.readouterr().out
    assert "env PYTHONUNBUFFERED=1" in text and "limit from one printed step to the next: 60 s" in text
    assert exit_code(*watched, "train.py") == 0
    assert "PYTHONUNBUFFERED" not in capsys.readouterr().out


def test_a_dry_run_over_several_nodes(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--ft-dry-run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint a:1 --rdzv-id 5 train.py"
    assert exit_code(*line.split()) == 0
    text = capsys.readouterr().out
    assert "nodes: 2:4" in text and "rendezvous: c10d at a:1, id 5" in text
    assert "env RANK=(known at the start)" in text


def test_help_is_printed_and_nothing_started(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    assert launcher.events == []
    assert "--ft-dry-run" in capsys.readouterr().out


def test_a_word_that_is_a_file_is_a_script(launcher: FakeLauncher, folder: Path) -> None:
    assert cli.is_subcommand(["validate"])
    assert not cli.is_subcommand(["--", "validate"])
    assert not cli.is_subcommand(["--nnodes", "1", "validate"])
    assert not cli.is_subcommand([])
    (folder / "validate").write_text("")
    assert not cli.is_subcommand(["validate"])
    assert exit_code("validate") == 0
    assert launcher.jobs[0].script == "validate"


def test_validate_prints_settings_with_their_sources(
    launcher: FakeLauncher, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("--shutdown-timeout")
    (folder / "job.yaml").write_text("fault_tolerance: {safety_factor: 3, rank_termination_signal: TERM}")
    monkeypatch.setenv("FT_BACKOFF", "1:30")
    assert (
        exit_code("validate", "--ft-cfg-path", "job.yaml", "--ft_param_connect_timeout=9", "--shutdown-timeout", "4")
        == 0
    )
    lines = {line.split(":")[0].strip(): " ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert launcher.events == []
    assert lines["safety_factor"] == "safety_factor: 3.0 # job.yaml"
    assert lines["rank_termination_signal"] == "rank_termination_signal: SIGTERM # job.yaml"
    assert lines["backoff"] == "backoff: [1.0, 30.0] # FT_BACKOFF"
    assert lines["connect_timeout"] == "connect_timeout: 9.0 # --ft_param_connect_timeout"
    assert lines["workers_stop_timeout"] == "workers_stop_timeout: 4.0 # --shutdown-timeout"
    assert lines["rank_heartbeat_timeout"] == "rank_heartbeat_timeout: 2700.0 # default"


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--ft-preload=none", "imported before ranks are forked: torch"),
        (
            "--ft-preload=auto",
            "imported before ranks are forked: torch; no more is learned, since there are no restarts",
        ),
        (
            "--max-restarts=1 --ft-preload=auto,json,csv train.py",
            "imported before ranks are forked: torch, json, csv; from",
        ),
        ("--max-restarts=1 --ft-preload=none train.py", "imported before ranks are forked: torch"),
        ("--ft-warm-start=off train.py", "since they start by exec: --ft-warm-start=off"),
        ("--no-python true", "since they start by exec: --no-python"),
    ],
)
def test_validate_says_what_preloading_would_do(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("validate", *line.split()) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  # preload: ")]
    assert said in note


@pytest.mark.usefixtures("launcher")
def test_what_validate_prints_is_a_yaml_that_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        exit_code("validate", "--ft-rank-section-timeouts=a:1,b:none", "--ft-port-range=5:9", "--ft-backoff=1:2") == 0
    )
    first = capsys.readouterr().out
    (folder / "again.yaml").write_text(first)
    assert exit_code("validate", "--ft-cfg-path=again.yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("line", "code"),
    [("", 0), ("train.py", 0), ("no.py", 2), ("--ft-safety-factor=x", 2), ("--tee 9 train.py", 2), ("--help", 0)],
)
def test_exit_codes_of_validate(line: str, code: int) -> None:
    assert exit_code("validate", *line.split()) == code


def test_which_program_runs_where_the_peer_is_installed_too(
    launcher: FakeLauncher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nvidia_resiliency_ext.py").write_text("raise SystemExit('never imported')")
    monkeypatch.syspath_prepend(str(folder))
    assert exit_code("train.py") == 0
    assert [warning for warning in launcher.jobs[0].warnings if "nvidia_resiliency_ext is installed too" in warning]


def test_an_empty_folder_of_the_peer_is_no_package(
    launcher: FakeLauncher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nvidia_resiliency_ext" / "inprocess" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    assert exit_code("train.py") == 0
    assert not [warning for warning in launcher.jobs[0].warnings if "is installed too" in warning]


def test_the_package_loads_its_names_when_asked() -> None:
    assert ft_launcher.__version__
    with pytest.raises(AttributeError):
        _ = ft_launcher.no_such_name


def test_a_schedulers_reply_file_says_what_was_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "reply.json"))
    assert exit_code("no.py") == 2
    reply = json.loads((folder / "reply.json").read_text())
    assert "ConfigError: script='no.py'" in reply["message"]["message"]
