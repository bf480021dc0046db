"""`ft_launcher.launch` in real programs: functions in real ranks, by each start method, and what is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.patience import until
from tests.program import clean_environment, ended, run

SHARED = Path(__file__).with_name("functions_program.py")
MARK = "FUNCTION_TEST_MARK"
LIMIT_S = 150
METHODS = ("spawn", "fork", "forkserver")
every_method = pytest.mark.parametrize("method", METHODS)


class Program:
    """A program with a main part, in a folder, TMPDIR and mark of its own.

    Its main part has `method` and `told`; the list `told` goes to stdout as JSON at the end.
    """

    def __init__(self, folder: Path, main: str, method: str = "spawn") -> None:
        self.folder, self.mark = folder, f"{MARK}={folder}".encode()
        self._short = tempfile.TemporaryDirectory(prefix="ft-program-")  # multiprocessing has its sockets in there
        self.tmp = Path(self._short.name)
        body = f"method, told = {method!r}, []\n{textwrap.dedent(main)}\nimport json; print(json.dumps(told))"
        text = f'{SHARED.read_text()}\n\nif __name__ == "__main__":\n{textwrap.indent(body, "    ")}\n'
        (folder / "program.py").write_text(text)
        self.process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=folder,
            env=clean_environment(**{MARK: str(folder), "TMPDIR": str(self.tmp)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self) -> list[Any]:
        """What it told, when it has ended well and left nothing behind."""
        code, stdout, stderr = ended(self.process, limit_s=LIMIT_S)
        assert code == 0, stderr
        self.leaves_nothing()
        return json.loads(stdout.splitlines()[-1])  # type: ignore[no-any-return]

    def leaves_nothing(self) -> None:
        """No process, and no file in TMPDIR but those of torch's compiler and of multiprocessing (if it is killed)."""
        until(lambda: not self.processes(), lambda: f"left over: {self.processes()}")
        left = [path.name for path in self.tmp.iterdir() if not path.name.startswith(("torchinductor", "pymp-"))]
        assert not left, left
        self._short.cleanup()

    def processes(self) -> dict[int, str]:
        """Those that carry the mark and live."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                    if state not in b"ZX":
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found


def told_by(folder: Path, main: str, method: str = "spawn") -> list[Any]:
    return Program(folder, main, method).told()


ONE_AFTER_THE_OTHER = """
import gc, multiprocessing, torch, traceback
from multiprocessing.shared_memory import SharedMemory
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
if method == "forkserver":  # or each rank would import torch by itself
    multiprocessing.set_forkserver_preload(["torch", "ft_launcher.python_api"])

def came_to(function, **settings):
    try:
        values = launch(function, LaunchConfig(start_method=method, workers_stop_timeout=0.5, **settings))()
        return [value for _, value in sorted(values.items())]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return [error.exit_code, rank, sorted(error.failures), str(error.__cause__), traceback.format_exc()]

memory, tensor = SharedMemory(create=True, size=2), torch.zeros(2).share_memory_()
queue = multiprocessing.get_context(method).Queue()
values = launch(works, LaunchConfig(nproc_per_node=2, start_method=method))(1, Box(20), memory, tensor, queue)
told.append([[rank, number, type(box) is Box, box.value, total.item()]
             for rank, (number, box, total) in sorted(values.items())])
told.append([list(bytes(memory.buf[:2])), tensor.tolist(), sorted(queue.get(timeout=60) for _ in range(2))])
queue.close()
SharedMemory(memory.name).close()
memory.close()
memory.unlink()
told.append(came_to(dies_once_and_sums, nproc_per_node=2, max_restarts=1))
told.append(came_to(raises, nproc_per_node=2, max_restarts=0))
told.append(came_to(hangs, max_restarts=1, rank_heartbeat_timeout=2, journal_dir="journal"))
told.append(came_to(exits_or_leaves_a_thread, nproc_per_node=2))
told.append(came_to(leaves_at_once, max_restarts=0))
told.append(came_to(returns_a_lock, max_restarts=0))
"""


@every_method
def test_one_function_after_the_other_in_one_program(tmp_path: Path, method: str) -> None:
    """Values go and come, shared things are shared, ranks train together twice, and each bad end is told as it is."""
    told = told_by(tmp_path, ONE_AFTER_THE_OTHER, method)
    values, shared, killed, raised, hung, returned, left, lock = told
    assert values == [[0, 21, True, "2", 3.0], [1, 121, True, "2", 3.0]]
    assert shared == [[1, 2], [1.0, 2.0], ["0", "1"]]
    assert killed == [["1", 3.0], ["1", 3.0]]
    assert raised[:3] == [1, 1, [1]], "rank 0 did not fail: the launcher ended it"
    shown = raised[4]
    assert shown.index("in raises") < shown.index("ValueError: the batch is empty") < shown.index("ChildFailedError")
    assert "ft_client" not in shown and "torch_launcher" not in shown
    assert hung[:2] == [85, 0] and "hangs: " in hung[4] and "the launcher ended it" in hung[4]
    (journal,) = (tmp_path / "journal").iterdir()
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "fault"] == ["hang", "hang"]
    assert [event["action"] for event in events if event["event"] == "decision"] == ["restart", "give up"]
    assert events[0]["command"] == ["__main__:hangs"]
    assert returned == [None, "done"]
    assert (left[0], left[3]) == (1, "None")
    assert lock[0] == 1 and "the function returned a lock that cannot be sent back" in lock[3]


THE_SECOND_CANNOT_START = """
from multiprocessing.process import BaseProcess
started, start = [], BaseProcess.start

def start_one(process):
    if started:
        raise BlockingIOError(11, "no more processes")
    started.append(process)
    start(process)

BaseProcess.start = start_one
try:
    launch(time.sleep, LaunchConfig(nproc_per_node=2, start_method=method))(600)
except BlockingIOError as error:
    told.append(str(error))
started[0].join()
told.append(started[0].exitcode)
"""


def test_if_a_fork_cannot_be_made_those_before_it_are_ended(tmp_path: Path) -> None:
    assert told_by(tmp_path, THE_SECOND_CANNOT_START, "fork") == ["[Errno 11] no more processes", -signal.SIGKILL]


def test_spawn_takes_the_zygote_where_it_may(tmp_path: Path) -> None:
    told = told_by(
        tmp_path,
        """
        for warm_start in ("on", "auto", "off"):
            told.append(sorted(launch(is_forked, LaunchConfig(nproc_per_node=2, warm_start=warm_start))().values()))
        """,
    )
    assert told == [[True, True], [True, True], [False, False]]


def test_a_fork_takes_what_cannot_travel(tmp_path: Path) -> None:
    main = "box = Box(4); told += launch(lambda: box.value, LaunchConfig(start_method='fork'))().values()"
    assert told_by(tmp_path, main) == [4]


def test_scripts_and_commands_run_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; open('out' + os.environ['RANK'], 'w').write(sys.argv[1])")
    told = told_by(
        tmp_path,
        """
        told += launch("train.py", LaunchConfig(nproc_per_node=2))(7).values()
        told += launch("/bin/touch", LaunchConfig())("touched").values()
        """,
    )
    assert told == [None, None, None]
    assert [(tmp_path / name).read_text() for name in ("out0", "out1", "touched")] == ["7", "7", ""]


@every_method
def test_a_program_is_left_as_it_was_found(tmp_path: Path, method: str) -> None:
    told = told_by(
        tmp_path,
        """
        import ctypes, faulthandler, gc, logging, multiprocessing, subprocess, torch
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        faulthandler.register(signal.SIGQUIT)
        signal.signal(signal.SIGTERM, lambda *_: None)
        logging.getLogger("ft_launcher").addHandler(logging.NullHandler())
        child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
        grandchild = int(child.stdout.readline())
        # A forked rank has the handler too, and outlives SIGTERM.
        config = LaunchConfig(nproc_per_node=2, start_method=method, workers_stop_timeout=1)

        def found():
            gc.collect()
            libc, subreaper, action = ctypes.CDLL(None), ctypes.c_int(), ctypes.create_string_buffer(512)
            libc.prctl(37, ctypes.byref(subreaper), 0, 0, 0)
            libc.sigaction(signal.SIGQUIT, None, action)
            wakeup = signal.set_wakeup_fd(-1)
            logger = logging.getLogger("ft_launcher")
            return {
                "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
                "action": action.raw[:8].hex() + action.raw[136:140].hex(),
                "subreaper": subreaper.value, "wakeup": wakeup,
                "environ": dict(os.environ), "method": multiprocessing.get_start_method(allow_none=True),
                "logging": [str(logger.handlers), logger.propagate, logger.level],
                "threads": [thread.name for thread in threading.enumerate()],
                "fds": sorted(os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
                              if os.path.exists(f"/proc/self/fd/{number}")),
                "path": sys.path, "gc": [gc.isenabled(), gc.get_freeze_count()], "cwd": os.getcwd(),
                "alive": [child.poll(), os.path.exists(f"/proc/{grandchild}")],
            }

        launch(exits, config)()  # what torch opens once in a process is there now
        before = found()
        launch(dies_once, config)()
        after = found()
        told += [[key, before[key], after[key]] for key in before if before[key] != after[key]]
        os.kill(grandchild, signal.SIGKILL)
        child.wait()
        """,
        method,
    )
    assert told == []


def test_in_a_thread_it_works_without_handlers_and_alone(tmp_path: Path) -> None:
    told = told_by(
        tmp_path,
        """
        def second():
            try:
                launch(exits, LaunchConfig())()
            except Exception as error:
                told.append(str(error))
            for rank in range(2):
                os.kill(int(open(f"up{rank}").read()), signal.SIGKILL)

        def first():
            try:
                launch(says_up_and_waits, LaunchConfig(nproc_per_node=2, max_restarts=0))("up")
            except Exception as error:
                told.append([type(error).__name__, error.exit_code])

        when_up("up", 2, second)
        thread = threading.Thread(target=first)
        thread.start()
        thread.join()
        """,
    )
    assert told == [
        "another launch() runs in this process; start them one after the other",
        ["ChildFailedError", 128 + signal.SIGKILL],
    ]


@every_method
def test_told_to_end_it_ends_its_ranks_and_says_so(tmp_path: Path, method: str) -> None:
    """Ranks that end by the signal, and in a second launch such that handle it."""
    told = told_by(
        tmp_path,
        """
        from torch.distributed.elastic.multiprocessing import SignalException
        for handled in ([], [1]):
            up = f"up{len(handled)}-"
            when_up(up, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
            try:
                launch(says_up_and_waits, LaunchConfig(nproc_per_node=2, start_method=method))(up, *handled)
            except SignalException as error:
                told += [error.sigval, error.exit_code]
            told.append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        """,
        method,
    )
    assert told == [signal.SIGTERM, 86, True] * 2


@every_method
def test_a_killed_program_leaves_no_rank(tmp_path: Path, method: str) -> None:
    main = "launch(says_up_and_waits, LaunchConfig(nproc_per_node=2, start_method=method))('up')"
    program = Program(tmp_path, main, method)
    ups = [tmp_path / f"up{rank}" for rank in range(2)]
    until(lambda: all(up.exists() and up.read_text() for up in ups), lambda: "no ranks")
    program.process.kill()
    ended(program.process)
    program.leaves_nothing()


def test_a_program_without_a_guard_is_told(tmp_path: Path) -> None:
    text = SHARED.read_text() + "\nlaunch(exits, LaunchConfig(max_restarts=0))()\n"
    (tmp_path / "bare.py").write_text(text)
    done = run([sys.executable, "bare.py"], folder=tmp_path, limit_s=LIMIT_S)
    assert done.returncode == 1
    assert "RuntimeError: launch() was called while a rank imports the program" in done.stderr
