"""Command lines: torch's namespace stays torch's, ours are read beside it, the script's arguments are never touched."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import parse_args

from ft_launcher.settings import command_line
from ft_launcher.settings.options import UsageError
from rank_monitor.contract.errors import ConfigError
from tests.ft_launcher.conftest import needs

PLAIN = [
    "train.py",
    "train.py --lr 0.1 -x --ft-looks-like-ours value --standalone",
    "--standalone --nproc-per-node=2 train.py",
    "--standalone --nproc_per_node 2 train.py --nproc-per-node 3",
    "--nnodes 2 --node_rank 1 --master_addr localhost --master_port 6000 train.py",
    "--nnodes=1:4 --rdzv-backend=c10d --rdzv_endpoint localhost:29400 --rdzv-id 7 --max-restarts=3 train.py",
    "--rdzv-conf=join_timeout=3,timeout=5 --rdzv-backend c10d train.py",
    "-m pytest -x -m slow",
    "-mt 3 pytest",
    "-r3 -t 0:1,1:2 train.py",
    "-r=3 --tee=3 --log-dir logs train.py",
    "--redirects 3 --local-ranks-filter 0,1 train.py",
    "--no-python ./run.sh a b",
    "--run-path train.py a",
    "--nn 2 train.py",
    "--stand train.py",
    "--max-restarts 1 --max-restarts 2 train.py",
    "-- train.py --nnodes 2",
    "train.py -- --nnodes 2",
    "-- train.py -- x",
    "train.py a -- b -- c",
    "--monitor-interval 0.5 --start-method fork --role trainer train.py",
    "--event-log-handler console train.py",
    "--log-line-prefix-template ${rank}: train.py",
    "--duplicate-stdout-filters a,b --virtual-local-rank --signals-to-handle SIGTERM --shutdown-timeout 4 train.py",
    "--numa-binding node --local-addr 127.0.0.1 --logs-specs mine train.py -",
    "- a",
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", PLAIN)
@pytest.mark.parametrize("variables", [{}, {"PET_NNODES": "3", "PET_STANDALONE": "1", "PET_REDIRECTS": "2"}], ids=str)
def test_a_torchrun_line_parses_as_torchrun_does(
    line: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(*line.split())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = line.split()
    ours = command_line.parse(words)
    namespace = {name: value for name, value in vars(ours.namespace).items() if not name.startswith("ft_")}
    assert namespace == vars(parse_args(words))
    assert not ours.texts


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", PLAIN)
def test_ours_in_front_change_nothing_of_torch(line: str) -> None:
    needs(*line.split())
    ours = command_line.parse(["--ft-dump-stacks", "--ft_param_safety-factor", "3", *line.split()])
    namespace = {name: value for name, value in vars(ours.namespace).items() if not name.startswith("ft_")}
    assert namespace == vars(parse_args(line.split()))
    assert ours.texts == {"dump_stacks": "true", "safety_factor": "3"}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("argument", ["--nproc", "--l", "--f", "--ft-unknown", "--ft-safety-factor=x", "", "a b", "--"])
def test_arguments_of_the_script_are_never_looked_at(argument: str) -> None:
    """torchrun itself fails on some of them: argparse takes them for ambiguous abbreviations."""
    assert command_line.parse(["train.py", "first", argument, "3"]).namespace.training_script_args == [
        "first",
        argument,
        "3",
    ]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "texts", "script"),
    [
        (["--ft-rank-heartbeat-timeout", "30", "train.py"], {"rank_heartbeat_timeout": "30"}, "train.py"),
        (["--ft_param_rank_heartbeat-timeout=30", "train.py"], {"rank_heartbeat_timeout": "30"}, "train.py"),
        (["--ft-rank-heartbeat-timeout", "-5", "train.py"], {"rank_heartbeat_timeout": "-5"}, "train.py"),
        (["--ft-rank-heartbeat-timeout", "-inf", "train.py"], {"rank_heartbeat_timeout": "-inf"}, "train.py"),
        (["--ft-rank-heartbeat-timeout", "", "train.py"], {"rank_heartbeat_timeout": ""}, "train.py"),
        (["--ft-safety-factor=2", "--ft_safety_factor", "3", "train.py"], {"safety_factor": "3"}, "train.py"),
        (["--ft-node-check=test -e a=b", "train.py"], {"node_check": "test -e a=b"}, "train.py"),
        (["--ft-dump-stacks", "train.py"], {"dump_stacks": "true"}, "train.py"),
        (["--ft-dump-stacks", "False", "train.py"], {"dump_stacks": "False"}, "train.py"),
        (["--ft-dump-stacks", "true"], {"dump_stacks": "true"}, "true"),
        (["--ft-dump-stacks", "--nnodes", "1", "train.py"], {"dump_stacks": "true"}, "train.py"),
        (["--ignore-missing-fault-tol-cfg", "train.py"], {"ignore_missing_cfg": "true"}, "train.py"),
        (["--ft-dry-run", "--", "train.py"], {"dry_run": "true"}, "train.py"),
    ],
)
def test_how_ours_take_their_values(words: list[str], texts: dict[str, str], script: str) -> None:
    parsed = command_line.parse(words)
    assert (parsed.texts, parsed.namespace.training_script) == (texts, script)


@pytest.mark.usefixtures("folder")
def test_flags_without_meaning_are_taken_with_their_values() -> None:
    words = [
        "--ft-enable-log-server",
        "--ft-log_server_port",
        "50051",
        "--ft_use_infra_group_rank",
        "false",
        "train.py",
    ]
    parsed = command_line.parse(words)
    assert parsed.namespace.training_script == "train.py"
    assert {key: flag for key, flag in parsed.spelled.items() if key not in parsed.texts} == {
        "enable_log_server": "--ft-enable-log-server",
        "log_server_port": "--ft-log_server_port",
        "use_infra_group_rank": "--ft_use_infra_group_rank",
    }


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--nprocs-per-node 2 train.py", "did you mean --nproc-per-node?"),
        ("--ft-rank-heart 2 train.py", "unknown option --ft-rank-heart"),
        ("--f train.py", "unknown option --f"),
        ("--ft-safety-factor", "--ft-safety-factor needs a value"),
        ("--ft-safety-factor --nnodes 2 train.py", "--ft-safety-factor needs a value"),
        ("--r 2 train.py", "ambiguous option"),
        ("--max-restarts x train.py", "invalid int value: 'x'"),
        ("--start-method x train.py", "invalid choice"),
        ("--nnodes", "expected one argument"),
        ("-q train.py", "unknown option -q"),
        ("", "no script given"),
        ("--nnodes 2", "no script given"),
        ("--nnodes 2 --", "no script given"),
    ],
)
def test_what_is_said_about_a_wrong_line(line: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        command_line.parse(line.split())
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("folder")
def test_a_wrong_variable_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    with pytest.raises(ConfigError, match=r"max_restarts='many' \(from PET_MAX_RESTARTS\): invalid int"):
        command_line.parse(["train.py"])
    assert command_line.parse(["--max-restarts=1", "train.py"]).namespace.max_restarts == 1
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(ConfigError, match=r"must be 0 or 1.*PET_STANDALONE=yes"):
        command_line.parse(["train.py"])


@pytest.mark.usefixtures("folder")
def test_the_source_of_an_option_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    assert command_line.parse(["train.py"]).source_of("nnodes") == "PET_NNODES"
    assert command_line.parse(["--nn", "3", "train.py"]).source_of("nnodes") == "--nnodes"


@pytest.mark.usefixtures("folder")
def test_help_shows_both_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--nproc-per-node" in text and "--ft-rank-heartbeat-timeout" in text and "validate" in text


def test_the_completion_is_for_this_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's option names torchrun; ours stand in the same parser. The package that writes it is optional."""
    needs("--print-completion")
    shtab = SimpleNamespace(SUPPORTED_SHELLS=["bash"], complete=lambda parser, shell: f"{shell} for {parser.prog}")
    monkeypatch.setitem(sys.modules, "shtab", shtab)
    with pytest.raises(SystemExit) as ended:
        command_line.parse(["--print-completion", "bash"])
    assert not ended.value.code and capsys.readouterr().out == "bash for ft_launcher\n"
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        command_line.parse(["--print-completion", "bash"])
    assert ended.value.code == 1 and "pip install shtab" in capsys.readouterr().err


def test_a_folder_is_not_needed(folder: Path) -> None:
    (folder / "train.py").unlink()
    assert command_line.parse(["train.py"]).namespace.training_script == "train.py"
