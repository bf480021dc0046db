"""Real jobs whose ranks fork from a zygote, and what befalls it: killed, stopped, unable to fork, badly preloaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import program
from tests.patience import until
from tests.program import ONE_TRY, clean_environment, ended

LIMIT_S = 100
WARM = "import ft_launcher.node.zygote.pool as pool; from ft_launcher.cli import program; {more}program()"

# Ranks of cycle 0 wait for a file, then rank 0 crashes; later ones end well. `forked` is told by what /proc maps.
TRAIN = """
import os, signal, time
forked = "libtorch" in open("/proc/self/maps").read()
cycle = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"start.{cycle}.{os.environ['RANK']}", "w") as file:
    file.write(f"{forked}")
if cycle == "0":
    while not os.path.exists("go"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "0" else time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def start(folder: Path, *words: str, more: str = "", threads: str | None = "1") -> subprocess.Popen[str]:
    given = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # of the fixture `modules`
    given |= {"OMP_NUM_THREADS": threads} if threads else {}
    return subprocess.Popen(
        [sys.executable, "-c", WARM.format(more=more), "--ft-stall-warning=none", *words],
        cwd=folder,
        env=clean_environment("OMP_", **given, **ONE_TRY),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    code, _, shown = ended(job, limit_s=LIMIT_S)
    return code, shown


def run(folder: Path, *words: str, more: str = "", threads: str | None = "1") -> tuple[int, str]:
    return finish(start(folder, *words, more=more, threads=threads))


def zygotes(job: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "ft_zygote\n"]


def started(folder: Path, cycle: int) -> list[bool]:
    """Of each rank of a cycle, whether it is a fork of a process with torch."""
    return [file.read_text() == "True" for file in sorted(folder.glob(f"start.{cycle}.*"))]


def with_crash(folder: Path, *words: str, to_zygote: int | None = None, more: str = "") -> tuple[int, str]:
    """A job in which a rank crashes once, after its zygote got a signal."""
    job = start(folder, "--nproc-per-node=2", "--max-restarts=1", *words, "train.py", more=more)
    until(lambda: len(started(folder, 0)) == 2 and all(file.stat().st_size for file in folder.glob("start.0.*")))
    if to_zygote is not None:
        (zygote,) = zygotes(job)
        os.kill(zygote, to_zygote)
    (folder / "go").touch()
    return finish(job)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_ranks_of_every_cycle_are_forks(folder: Path, mode: str) -> None:
    code, shown = with_crash(folder, f"--ft-warm-start={mode}")
    assert code == 0, shown
    assert (started(folder, 0), started(folder, 1)) == ([True, True], [True, True]), shown


def test_off_says_so_and_starts_by_exec(folder: Path) -> None:
    code, shown = with_crash(folder, "--ft-warm-start=off")
    assert (code, started(folder, 0), started(folder, 1)) == (0, [False] * 2, [False] * 2), shown
    assert shown.count("Ranks start by exec: --ft-warm-start=off.") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_restart_does_not_wait_for_a_lost_zygote(folder: Path, number: signal.Signals) -> None:
    code, shown = with_crash(folder, to_zygote=number)
    assert (code, started(folder, 0), len(started(folder, 1))) == (0, [True] * 2, 2), shown
    assert "The zygote was lost" in shown and "Another is started" in shown


def test_who_insists_waits_for_the_next_zygote(folder: Path) -> None:
    code, shown = with_crash(folder, "--ft-warm-start=on", to_zygote=signal.SIGKILL)
    assert (code, started(folder, 0), started(folder, 1)) == (0, [True] * 2, [True] * 2), shown
    assert "The zygote is there again" in shown


@pytest.mark.parametrize("may_fork", [0, 1, 2], ids=["none", "the one between", "one rank"])
def test_without_memory_for_a_fork_ranks_start_by_exec(folder: Path, may_fork: int) -> None:
    """The zygote's own `os.fork` fails from a certain call on; those it forked before leave no trace."""
    more = f"""
import errno, os
fork, launcher, calls = os.fork, os.getpid(), [0]
def failing():
    calls[0] += os.getpid() != launcher
    if calls[0] > {may_fork}:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = failing
"""
    code, shown = with_crash(folder, more=f"exec({more!r}); ")
    assert (code, started(folder, 0), started(folder, 1)) == (0, [False] * 2, [False] * 2), shown
    assert "Ranks start by exec: Resource temporarily unavailable when forking" in shown


PRELOADS = {
    "no_such_module": ("preload='no_such_module'", "ModuleNotFoundError"),
    "leaves": ("preload='leaves'", "it ends the interpreter"),
    "fails": ("preload='fails'", "ValueError: no"),
}
MODULES = {
    "leaves": "import sys; sys.exit(3)",
    "fails": "raise ValueError('no')",
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
    "fine": "import time; value = time.time()",
    "told": "import os; os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), 15))",
    "slow": "import os, time; time.sleep(float(os.environ['IMPORT_TAKES_S']))",
}


@pytest.fixture
def modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules to preload, installed somewhere."""
    folder = tmp_path_factory.mktemp("installed")
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder


@pytest.mark.parametrize("module", PRELOADS)
def test_a_module_that_cannot_be_preloaded_is_an_error(folder: Path, modules: Path, module: str) -> None:
    code, shown = run(folder, f"--ft-preload=json,{module}", "train.py")
    assert code == 2 and all(words in shown for words in PRELOADS[module]), shown


def test_a_preloaded_module_is_shared(folder: Path, modules: Path) -> None:
    (folder / "show.py").write_text("import fine, os; open(os.environ['RANK'], 'w').write(str(fine.value))")
    code, shown = run(folder, "--ft-preload=fine", "--nproc-per-node=2", "show.py")
    assert code == 0 and (folder / "0").read_text() == (folder / "1").read_text(), shown


def test_a_signal_in_the_first_moment_of_a_rank_is_not_lost(folder: Path, modules: Path) -> None:
    """The zygote ignores signals of a terminal, and so do its forks until they are like a new process."""
    (folder / "go").touch()
    code, shown = run(folder, "--ft-preload=told", "train.py")
    assert code == 128 + signal.SIGTERM and not (folder / "start.0.0").exists(), shown


def test_a_module_beside_the_script_is_not_preloaded(folder: Path) -> None:
    (folder / "mine.py").write_text("")
    code, shown = run(folder, "--ft-preload=mine", "train.py")
    assert code == 2 and "preload='mine'" in shown


def test_a_preloaded_module_with_a_thread_costs_the_warm_start(folder: Path, modules: Path) -> None:
    (folder / "go").touch()
    code, shown = run(folder, "--ft-preload=threads", "--max-restarts=1", "train.py")
    assert code == 0 and started(folder, 0) == [False], shown
    assert "Ranks start by exec: an import started 1 thread" in shown
    code, shown = run(folder, "--ft-preload=threads", "--ft-warm-start=on", "train.py")
    assert code == 2 and "warm_start='on'" in shown and "an import started 1 thread" in shown


@pytest.mark.parametrize(
    ("takes_s", "more"),
    [
        pytest.param("0.5", "pool._SLOW_PRELOAD_S = 0.4; ", id="above the limit"),
        pytest.param("60", "", id="a minute", marks=pytest.mark.slow),
    ],
)
def test_a_preloaded_module_that_takes_long_is_told_of(
    folder: Path, modules: Path, monkeypatch: pytest.MonkeyPatch, takes_s: str, more: str
) -> None:
    monkeypatch.setenv("IMPORT_TAKES_S", takes_s)
    (folder / "go").touch()
    code, shown = run(folder, "--ft-preload=slow", "--max-restarts=1", "train.py", more=more)
    assert (code, started(folder, 0), started(folder, 1)) == (0, [True], [True]), shown
    assert shown.count("ft_launcher: --ft-preload slow took") == 1


def test_32_ranks_crash_and_start_again(folder: Path) -> None:
    (folder / "go").touch()
    code, shown = run(folder, "--nproc-per-node=32", "--max-restarts=1", "--redirects=3", "--log-dir=logs", "train.py")
    assert (code, started(folder, 1)) == (0, [True] * 32), shown


def test_a_path_with_spaces_and_letters_beyond_ascii(folder: Path) -> None:
    place = folder / "ein ordner ü" / "日本 {x} %s"
    place.mkdir(parents=True)
    (folder / "train.py").rename(place / "träin 1.py")
    (folder / "go").touch()
    words = ("--max-restarts=1", "--redirects=3", f"--log-dir={place / 'lögs'}", str(place / "träin 1.py"))
    code, shown = run(folder, *words)
    assert (code, started(folder, 0), started(folder, 1)) == (0, [True], [True]), shown
    assert list((place / "lögs").glob("*/cycle_1/0/stdout.log")), shown


def test_a_folder_that_was_removed_is_an_error(folder: Path) -> None:
    """Importing torch there ends a plain interpreter without a word of ours."""
    place = folder / "removed"
    place.mkdir()
    remove = ["/bin/sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh"]
    job = program.run([*remove, sys.executable, "-m", "ft_launcher", "../train.py"], folder=place, limit_s=LIMIT_S)
    assert (job.returncode, job.stdout) == (2, "")
    said = " ft_launcher: the current folder cannot be used: No such file or directory. Change to one that is there\n"
    assert len(job.stderr.splitlines()) == 1 and job.stderr.endswith(said)


def test_ranks_counted_by_the_processors_are_forks(folder: Path) -> None:
    """OMP_NUM_THREADS depends on their number and must be set before torch is imported."""
    (folder / "go").touch()
    code, shown = run(folder, "--nproc-per-node=cpu", "--max-restarts=1", "train.py", threads=None)
    assert (code, set(started(folder, 1))) == (0, {True}), shown


def test_a_wrong_guess_of_their_number_costs_the_warm_start(folder: Path) -> None:
    more = "import os; from ft_launcher.settings import prescan; prescan.guess_ranks = lambda word, environ: 1; "
    (folder / "go").touch()
    code, shown = run(folder, "--nproc-per-node=2", "--max-restarts=1", "train.py", more=more, threads=None)
    assert (code, started(folder, 1)) == (0, [False, False]), shown
    says = "Ranks start by exec: the ranks have another OMP_NUM_THREADS than the launcher had when it imported torch"
    assert shown.count(says) == 1


def test_a_script_that_edits_itself_is_read_anew(folder: Path) -> None:
    (folder / "edits.py").write_text(
        "import pathlib, sys\nfile = pathlib.Path(__file__)\n"
        "file.write_text(\"open('second', 'w').write(__file__)\")\nsys.exit(1)\n"
    )
    code, shown = run(folder, "--max-restarts=1", "edits.py")
    assert code == 0 and (folder / "second").exists(), shown
