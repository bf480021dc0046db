"""What the bootstrap does beside running the script: hello, stacks, the exception that ends a rank, and fail open."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.messages import Attach, Hello, RankException, Sections
from tests.client.fake_monitor import FakeMonitor, wait_until
from tests.client.rank import ended, started

WAIT = "print('ready', flush=True)\ninput()\n"
WRONG = "class Wrong(Exception):\n    ...\n\n\ndef inner():\n    raise Wrong('bad ä')\n\n\ninner()\n"


def test_a_rank_says_hello_and_is_not_yet_watched(monitor: FakeMonitor, tmp_path: Path) -> None:
    with started(WAIT, tmp_path, monitor.path) as rank:
        assert monitor.wait_for(Hello) == [Hello(rank.pid)]
        wait_until(lambda: monitor.progress, "a stamp of progress")
        assert ended(rank, "\n")[0] == 0
    assert monitor.kinds() == ["Hello"]


def test_the_script_uses_the_connection_of_the_bootstrap(monitor: FakeMonitor, tmp_path: Path) -> None:
    script = "import ft_client as ft\nwith ft.section('setup'):\n    pass\nft.shutdown()\n"
    with started(script, tmp_path, monitor.path) as rank:
        assert ended(rank) == (0, "", "")
    monitor.wait_for(Sections, 2)
    wait_until(lambda: monitor.kinds() == ["Hello", "Attach", "Sections", "Sections", "Detach"], "the whole story")
    assert monitor.connections == 1


def test_stacks_are_written_when_asked_for_also_with_the_lock_held(monitor: FakeMonitor, tmp_path: Path) -> None:
    """And with every signal blocked in the threads of the script."""
    script = """
import ctypes, signal, threading; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
threading.Thread(target=threading.Event().wait, name="other", daemon=True).start()
def stuck():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(60)
stuck()
"""
    with started(script, tmp_path, monitor.path) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        stacks = tmp_path / "stacks.txt"

        def asked() -> bool:
            os.kill(rank.pid, 41)
            return f'File "{tmp_path / "script.py"}", line 6 in stuck' in stacks.read_text()

        wait_until(asked, "the stack of the call that holds the lock")
        assert "in wait" in stacks.read_text()
        assert rank.poll() is None


def test_an_exception_that_ends_the_rank_is_reported(monitor: FakeMonitor, tmp_path: Path) -> None:
    with started(WRONG, tmp_path, monitor.path) as rank:
        code, _, err = ended(rank)
    assert code == 1
    assert err.startswith('Traceback (most recent call last):\n  File "')
    assert err.endswith("Wrong: bad ä\n")
    (report,) = monitor.wait_for(RankException)
    assert (report.type, report.message, report.traceback) == ("Wrong", "bad ä", err.replace("__main__.", ""))
    file = json.loads((tmp_path / "error.json").read_text())
    assert file["message"]["message"] == "Wrong: bad ä"
    assert file["message"]["extraInfo"]["py_callstack"] == err.replace("__main__.", "")
    assert file["message"]["extraInfo"]["timestamp"].isdigit()


def test_torch_reads_the_error_file(monitor: FakeMonitor, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    with started(WRONG, tmp_path, monitor.path) as rank:
        ended(rank)
    failure = ProcessFailure(0, rank.pid, 1, str(tmp_path / "error.json"))
    assert failure.message["message"] == "Wrong: bad ä"
    assert failure.timestamp > 0


NOT_REPORTED = {
    "exit code": "import sys\nsys.exit(3)\n",
    "exit code 0 after an error": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise SystemExit(0)\n",
    "none led to it": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise SystemExit(3) from None\n",
    "for the launcher": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise SystemExit(16)\n",
    "click's wish": "import click\nclick.command()(lambda: click.get_current_context().exit(3))()\n",
    "Ctrl-C": "raise KeyboardInterrupt\n",
    "in a forked child": "import os\nif os.fork() == 0:\n    1 / 0\nos.wait()\nraise SystemExit(1)\n",
    "in a thread": "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n",
}


@pytest.mark.parametrize("name", NOT_REPORTED)
def test_what_ends_no_rank_by_exception_is_not_reported(monitor: FakeMonitor, tmp_path: Path, name: str) -> None:
    with started(NOT_REPORTED[name], tmp_path, monitor.path) as rank:
        ended(rank)
    assert monitor.wait_for(Hello)
    assert not monitor.messages(RankException)
    assert not (tmp_path / "error.json").exists()


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("import sys\nsys.exit('text')\n", "SystemExit", "text"),
        ("try:\n    1 / 0\nexcept Exception:\n    raise SystemExit(3)\n", "ZeroDivisionError", "division by zero"),
        ("try:\n    [].pop()\nexcept Exception as e:\n    error = e\nraise SystemExit(1) from error\n", "IndexError",
         "pop from empty list"),
    ],
)  # fmt: skip
def test_an_error_that_the_program_handles_by_its_exit_is_reported(
    monitor: FakeMonitor, tmp_path: Path, script: str, kind: str, message: str
) -> None:
    with started(script, tmp_path, monitor.path) as rank:
        assert ended(rank)[0] != 0
    assert monitor.wait_for(RankException)
    (told,) = monitor.messages(RankException)
    assert (told.type, told.message) == (kind, message)


def test_an_error_file_that_is_there_already_is_left_alone(monitor: FakeMonitor, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("by record")
    with started(WRONG, tmp_path, monitor.path) as rank:
        ended(rank)
    monitor.wait_for(RankException)
    assert (tmp_path / "error.json").read_text() == "by record"


STRANGE = {
    "no words": ("class E(Exception):\n    __str__ = None\nraise E\n", "<no words: str() raised TypeError>"),
    "many words": ("raise ValueError('ä' * 100_000)\n", "ä" * 1000),
    "deep": ("def f():\n    f()\nf()\n", "maximum recursion depth exceeded"),
    "of a module": ("import json\njson.loads('{')\n", "Expecting property name enclosed in double quotes"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_exceptions_are_reported_too(monitor: FakeMonitor, tmp_path: Path, name: str) -> None:
    script, message = STRANGE[name]
    with started(script, tmp_path, monitor.path) as rank:
        assert ended(rank)[0] == 1
    assert monitor.wait_for(RankException)[0].message.startswith(message)


BROKEN: dict[str, dict[str, Any]] = {
    "nobody listens": {env.RANK_MONITOR_SOCKET: "/nowhere/m0"},
    "no launcher": {env.RANK_MONITOR_SOCKET: ""},
    "stack file cannot be made": {env.STACK_FILE: "/nowhere/stacks"},
    "stack signal is none": {env.STACK_SIGNAL: "x"},
    "stack signal is impossible": {env.STACK_SIGNAL: "9"},
    "error file cannot be made": {"TORCHELASTIC_ERROR_FILE": "/nowhere/error.json"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_of_ours_fails_the_script_runs(monitor: FakeMonitor, tmp_path: Path, name: str) -> None:
    with started("print('ran')\nraise SystemExit(3)\n", tmp_path, monitor.path, **BROKEN[name]) as rank:
        assert ended(rank) == (3, "ran\n", "")
    with started(WRONG, tmp_path, monitor.path, **BROKEN[name]) as rank:
        assert ended(rank)[0] == 1


def test_an_installation_that_is_broken_is_reported_and_the_script_runs(tmp_path: Path) -> None:
    package = tmp_path / "rank_monitor"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('torn')")
    with started("print('ran')\n", tmp_path, tmp_path / "m0", PYTHONPATH=str(tmp_path)) as rank:
        assert ended(rank) == (0, "ran\n", "ft_client: this rank is not watched: RuntimeError: torn\n")
    with started(WRONG, tmp_path, tmp_path / "m0", PYTHONPATH=str(tmp_path)) as rank:
        assert ended(rank)[0] == 1


CHILDREN = """
import multiprocessing, os, subprocess, sys

def child(queue):
    import ft_client as ft
    from ft_client import process
    ft.init()
    with ft.section("child"):
        queue.put(process.current() is None)

if __name__ == "__main__":
    import ft_client as ft
    with ft.section("parent"):
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(method, "without a link:", queue.get())
            process.join()
        subprocess.run([sys.executable, "-c", "import ft_client"], check=True)
        pool = multiprocessing.get_context("spawn").Pool(1)
        print(pool.apply(os.getenv, ("FT_RANK_MONITOR_IPC_SOCKET",)) is not None)
"""


def test_children_do_not_speak_for_the_rank(monitor: FakeMonitor, tmp_path: Path) -> None:
    """A forked child has no connection; a spawned one makes one only when it asks to be watched itself."""
    with started(CHILDREN, tmp_path, monitor.path) as rank:
        code, out, _ = ended(rank)
    assert (code, out) == (0, "fork without a link: True\nspawn without a link: False\nTrue\n")
    assert [hello.pid for hello in monitor.messages(Hello)].count(rank.pid) == 1
    assert monitor.connections == 2
    assert len(monitor.messages(Attach)) == 2


def test_a_rank_that_is_killed_leaves_its_last_state_behind(monitor: FakeMonitor, tmp_path: Path) -> None:
    script = "import ft_client as ft, os\nwith ft.section('step'):\n    os.kill(os.getpid(), 9)\n"
    with started(script, tmp_path, monitor.path) as rank:
        assert ended(rank)[0] == -signal.SIGKILL
    assert [name for name, _ in monitor.wait_for(Sections)[-1].open] == ["step"]
