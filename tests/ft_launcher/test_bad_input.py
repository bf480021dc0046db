"""Bad input, a table: its exit code, one message with what was wrong and where, nothing left behind, no traceback.

A row with `runs` needs the running launcher and is a process of its own; the others end before anything starts.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.ft_launcher.conftest import main, needs
from tests.program import run


@dataclass(frozen=True)
class Row:
    """A command line with words for `{folder}` and `{port}` (one that is taken), variables, and what comes of it."""

    name: str
    line: str
    says: tuple[str, ...]
    code: int = 2
    variables: dict[str, str] = field(default_factory=dict)
    runs: bool = False


TABLE = [
    Row("wrong flag", "--ft-rank-hartbeat-timeout 3 train.py", ("--ft-rank-hartbeat-timeout", "did you mean")),
    Row("wrong flag of torch", "--nprocs-per-node 3 train.py", ("--nprocs-per-node", "did you mean --nproc-per-node")),
    Row("no script", "--nnodes 1", ("no script given", "Usage")),
    Row("text", "--ft-stall-warning soon train.py", ("stall_warning='soon'", "--ft-stall-warning", "not a number")),
    Row("negative", "--ft-stall-warning -1 train.py", ("stall_warning='-1'", "above zero")),
    Row("NaN", "--ft-stall-warning=nan train.py", ("stall_warning='nan'", "finite")),
    Row("no steps", "--ft-memory-interval 0 train.py", ("memory_interval='0'", "at least 1", "steps, auto or none")),
    Row("no copy", "--ft-memory-keep 0 train.py", ("memory_keep='0'", "at least 1")),
    Row("no bytes", "--ft-memory-limit 8GB,2 train.py", ("memory_limit='8GB,2'", "like 512MiB or 8GiB")),
    Row("a time below zero", "--ft-memory-linger -1 train.py", ("memory_linger='-1'", "must not be negative")),
    Row("zero", "--ft-stall-warning=0 train.py", ("stall_warning='0'", "write none for no limit")),
    Row("of a variable", "train.py", ("FT_STALL_WARNING", "'x'"), variables={"FT_STALL_WARNING": "x"}),
    Row("of a PET_ variable", "train.py", ("PET_MAX_RESTARTS", "'x'"), variables={"PET_MAX_RESTARTS": "x"}),
    Row("MIN above MAX", "--nnodes 3:2 train.py", ("--nnodes", "'3:2'", "MIN not above MAX")),
    Row("no node", "--nnodes 0 train.py", ("--nnodes", "'0'", "at least 1")),
    Row("nodes in words", "--nnodes two train.py", ("--nnodes", "'two'")),
    Row("no room for spares", "--nnodes 2 --ft-spares 1 train.py", ("spares=1", "--ft-spares", "no room", "Use c10d")),
    Row(
        "no whole segments",
        "--nnodes 3:4 --ft-segment 2 train.py",
        ("segment=2", "--ft-segment", "3, is not a multiple"),
    ),
    Row(
        "no TLS file",
        "--rdzv-backend etcd-v3 --rdzv-endpoint localhost:1 --rdzv-conf ca_cert=/no/ca.pem --nnodes 2 train.py",
        ("--rdzv-conf", "ca_cert=/no/ca.pem", "no such file"),
    ),
    Row("no beat within the timeout", "--ft-node-beat 20 train.py", ("node_beat=20", "below node_timeout=15")),
    Row(
        "unknown fault", "--ft-inject kind:sigkil train.py", ("--ft-inject", "did you mean sigkill?", "kinds: sigkill,")
    ),
    Row(
        "unknown fault to validate", "validate --ft-inject kind:sleep --ft-inject=step:3", ("step:3: kind is missing",)
    ),
    Row("unknown fault of a variable", "train.py", ("FT_INJECT", "step:x"), variables={"FT_INJECT": "step:x"}),
    Row("no integer", "--max-restarts some train.py", ("--max-restarts", "'some'")),
    Row("unknown YAML key", "--ft-cfg-path {folder}/key.yaml train.py", ("key.yaml", "hartbeat=1", "allow-unknown")),
    Row("YAML list", "--ft-cfg-path {folder}/list.yaml train.py", ("list.yaml", "is a list")),
    Row("missing file", "--fault-tol-cfg-path no.yaml train.py", ("no.yaml", "--fault-tol-cfg-path", "no such file")),
    Row("unreadable file", "--ft-cfg-path {folder} train.py", ("--ft-cfg-path", "cannot be read")),
    Row("a pipe for YAML", "--ft-cfg-path {folder}/pipe train.py", ("--ft-cfg-path", "/pipe", "not a regular file")),
    Row("a pipe for YAML to validate", "validate --ft-cfg-path {folder}/pipe", ("--ft-cfg-path", "not a regular file")),
    Row("script not found", "no.py", ("no.py", "no such file", "{folder}")),
    Row("no execute permission", "--no-python ./train.py", ("./train.py", "chmod +x")),
    Row("command not found", "--no-python no-such-command", ("no-such-command", "no such command")),
    Row("a pipe for a log", "--ft-nvrx-logfile {folder}/pipe train.py", ("nvrx_logfile=", "/pipe", "a link or a FIFO")),
    Row(
        "a pipe for a token",
        "--ft-status-port {port} --ft-status-token-file {folder}/pipe train.py",
        ("status_token_file=", "/pipe", "not a regular file"),
    ),
    Row("-m and --no-python", "-m --no-python json", ("--no-python and -m exclude each other",)),
    Row("no interpreter", "train.py", ("PYTHON_EXEC", "/no/python"), variables={"PYTHON_EXEC": "/no/python"}),
    Row(
        "warm start of no script",
        "--ft-warm-start=on --no-python /bin/true",
        ("warm_start='on'", "--ft-warm-start", "no Python scripts", "Use auto"),
        runs=True,
    ),
    Row(
        "preloaded module that is not there",
        "--ft-warm-start=on --ft-preload no_such_module train.py",
        ("preload='no_such_module'", "--ft-preload", "ModuleNotFoundError"),
        runs=True,
    ),
    Row(
        "preloaded module that ends the interpreter",
        "--ft-warm-start=on --ft-preload this_exits train.py",
        ("preload='this_exits'", "exit 3"),
        runs=True,
        variables={"PYTHONPATH": "{folder}/modules"},
    ),
    Row(
        "an expression without RE2",
        r"--ft-watch-log step.(?P<iteration>\d+) train.py",
        ("watch_log=", "--ft-watch-log", "google-re2", "pip install 'ft-launcher[watch]'"),
        runs=True,
        variables={"PYTHONPATH": "{folder}/modules"},
    ),
    Row("no event handler", "--event-log-handler=nosuch train.py", ("event_log_handler='nosuch'", "null and console")),
    Row("no signal to handle", "--signals-to-handle=SIGKILL train.py", ("'SIGKILL'", "cannot be handled")),
    Row("bad streams", "--tee 0:7 train.py", ("tee='0:7'",)),
    Row("no backend", "--rdzv-backend=c11d train.py", ("rdzv_backend='c11d'", "c10d")),
    Row("port taken", "--master-port {port} train.py", ("{port}", "in use"), code=81, runs=True),
    Row(
        "endpoint does not resolve",
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint no-such-host.invalid:1 train.py",
        ("no-such-host.invalid:1", "does not resolve"),
        code=81,
        runs=True,
    ),
    Row("log folder not writable", "--log-dir train.py/logs train.py", ("--log-dir", "Not a directory"), runs=True),
]


@pytest.fixture
def port() -> Iterator[int]:
    """A port on loopback that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder with files of the table; TMPDIR is an empty folder of its own."""
    (folder / "key.yaml").write_text("fault_tolerance: {hartbeat: 1}\n")
    (folder / "list.yaml").write_text("- fault_tolerance: {}\n")
    os.mkfifo(folder / "pipe")
    (folder / "modules").mkdir()
    (folder / "modules" / "this_exits.py").write_text("raise SystemExit(3)\n")
    (folder / "modules" / "re2.py").write_text("raise ModuleNotFoundError('No module named re2')\n")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    return folder


def run_apart(words: list[str]) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of the launcher as a process of its own."""
    command = [sys.executable, "-m", "ft_launcher", *words]
    ended = run(command, limit_s=120)
    return ended.returncode, ended.stdout, ended.stderr


def run_here(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """The same in this process."""
    with pytest.raises(SystemExit) as exited:
        main(words)
    return exited.value.code, *capfd.readouterr()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input(
    row: Row, place: Path, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.rglob("*"))
    for name, value in row.variables.items():
        monkeypatch.setenv(name, value.format(folder=place))
    words = row.line.format(folder=place, port=port).split()
    needs(*words)
    code, out, err = run_apart(words) if row.runs else run_here(words, capfd)
    assert code == row.code, err
    assert out == ""
    assert "Traceback" not in err
    (message,) = [line for line in err.splitlines() if re.match(r"(\d\d:\d\d:\d\d )?ft_launcher: ", line)]
    for says in row.says:
        assert says.format(folder=place, port=port) in message
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_ranks_per_gpu_without_a_gpu(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, message = run_here(["--nproc-per-node", "gpu", "train.py"], capfd)
    assert code == 2
    assert " ft_launcher: nproc_per_node='gpu' (from --nproc-per-node): " in message
    assert not list((place / "tmp").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_numa_binding_without_a_gpu(place: Path) -> None:
    needs("--numa-binding")
    code, _, err = run_apart(["--numa-binding=node", "train.py"])
    assert code == 2 and "Traceback" not in err, err
    assert "numa_binding='node' (from --numa-binding): torch cannot bind: " in err
    assert not list((place / "tmp").iterdir())


def test_a_long_tmpdir_is_no_bad_input(place: Path) -> None:
    long = place / "tmp" / ("x" * 120) / ("y" * 120)
    long.mkdir(parents=True)
    command = [sys.executable, "-m", "ft_launcher", "train.py"]
    variables = {**os.environ, "TMPDIR": str(long)}
    ended = run(command, environ=variables, limit_s=120)
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert not list(long.iterdir())


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@pytest.mark.parametrize(
    ("option", "code"),
    [("--log-dir={full}/logs", 2), ("--ft-journal-dir={full}/j", 0)],
)
def test_no_free_disk(place: Path, option: str, code: int) -> None:
    full = place / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=4k,nr_inodes=1 none {full} && exec "
    launcher = f"{sys.executable} -m ft_launcher {option.format(full=full)} train.py"
    command = ["unshare", "--mount", "sh", "-c", mount + launcher]
    ended = run(command, limit_s=120)
    assert ended.returncode == code, ended.stderr
    assert "No space left on device" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout == ("trained\n" if code == 0 else "")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_no_usual_temporary_folder(place: Path) -> None:
    (place / "fails.py").write_text(
        "import subprocess, sys\nprint('asked', subprocess.run([*sys.argv[1:]]))\nsys.exit(1)"
    )
    # Empty folders, in which no other job is found, and the current one read-only as well.
    mount = f"set -e; mount -t tmpfs none /dev/shm; mount --bind {place} /mnt; mount -o remount,ro,bind /mnt; cd /mnt; "
    mount += "for d in /tmp /var/tmp; do mount -t tmpfs -o ro none $d; done; "
    launcher = f"exec {sys.executable} -m ft_launcher fails.py {sys.executable} -m ft_launcher status"
    ended = run(["unshare", "--mount", "sh", "-c", mount + launcher], environ=without_temporary_folder(), limit_s=120)
    assert ended.returncode == 1, ended.stderr
    assert "temporary files are in /dev/shm (" in ended.stderr and "Traceback" not in ended.stderr
    assert "/dev/shm/ft_launcher-0/" in ended.stderr, "the logs of the fault"
    assert "returncode=0" in ended.stdout, ended.stdout


def without_temporary_folder() -> dict[str, str]:
    """Returns the environment without the variables that name one."""
    return {
        name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP", "XDG_STATE_HOME")
    }


FILLS_THE_DISK_OF_LOGS = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open(sys.argv[1] + "/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            sys.exit(1)
print("trained")
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_disk_of_logs_that_is_full_is_no_reason_to_leave(place: Path) -> None:
    full = place / "full"
    full.mkdir()
    (place / "fills.py").write_text(FILLS_THE_DISK_OF_LOGS)
    launcher = f"{sys.executable} -m ft_launcher --max-restarts=1 --log-dir={full}/logs fills.py {full}"
    command = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=1m none {full} && exec {launcher}"]
    ended = run(command, limit_s=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "trained\n"
    assert f"health check space: {full}/logs is full: 0 bytes are free; the node takes part" in ended.stderr
