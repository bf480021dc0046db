"""A script under the bootstrap against the same script under plain python: the same output, words and exit code."""

from __future__ import annotations

import py_compile
import re
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ft_client import bootstrap
from rank_monitor.contract import env
from tests import program
from tests.client.fake_monitor import FakeMonitor
from tests.patience import until
from tests.program import clean_environment

BOOTSTRAP = ("-u", "-m", "ft_client.bootstrap")
PLAIN = ("-u",)

SHOW = """
import sys
loader = type(__loader__).__name__ if not isinstance(__loader__, type) else __loader__.__name__
names = {name: value for name, value in globals().items() if name not in ("sys", "loader", "__loader__")}
print(names.pop("__spec__") and (__spec__.name, __spec__.origin, __spec__.parent), loader)
print(names, sys.modules["__main__"].__dict__ is globals())
print(sys.argv, sys.path, sys.orig_argv, sys.flags)
"""
RAISE = "def inner():\n    raise ValueError('wrong ä')\n\n\ndef outer():\n    inner()\n\n\nouter()\n"
IN_MAIN = """
import multiprocessing, os, pickle, sys

class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x)

def main(method):
    print(pickle.dumps(Point(3)), pickle.loads(pickle.dumps(Point(3))).x)
    with multiprocessing.get_context(method).Pool(1) as pool:
        print(pool.map(double, [Point(1), Point(2)])[1].x)

print("run as", __name__, flush=True)
if __name__ == "__main__":
    main(sys.argv[1])
"""
AT_EXIT = """
import atexit, threading
atexit.register(print, "first registered")
atexit.register(print, "second registered")
def late():
    threading.main_thread().join()
    print("a thread that python waits for", threading.main_thread().is_alive())
threading.Thread(target=late).start()
print(threading.enumerate(), threading.active_count(), threading.current_thread() is threading.main_thread())
class Last:
    def __del__(self):
        print("destroyed")
last = Last()
file = open("unclosed.txt", "w")
file.write("flushed")
print("end")
"""
HOOK = """
import sys, traceback
def hook(kind, error, trace):
    print("mine:", kind.__name__, error, [frame.name for frame in traceback.extract_tb(trace)])
    print(error.__traceback__ is trace, sys.last_traceback is trace)
sys.excepthook = hook
def inner(): raise KeyError("x")
inner()
"""
CHAINED = (
    "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as error:\n    raise RuntimeError('two') from error\n"
)
NEIGHBOURS = "import client, config, utils, link, process, stacks, queue\nprint(client.a, config.a, utils.a)\n"
NEIGHBOURS += "print(link.a, process.a, stacks.a, queue.a)\n"
OPEN = "file = open('/dev/null')\nprint(file.fileno())\n"
SIGNALS = """
import signal
print([(int(n), str(signal.getsignal(n))) for n in signal.valid_signals()], signal.pthread_sigmask(0, []))
"""
SIGWAIT = """
import os, signal
everything = signal.valid_signals()
print(signal.pthread_sigmask(signal.SIG_BLOCK, everything))
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD):
    os.kill(os.getpid(), number)
    print(signal.sigwait({number}))
"""


@dataclass(frozen=True)
class Case:
    """Words behind `python`, and the files they need beside those every case has."""

    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    stdin: str = ""


FILES = {
    "show.py": SHOW,
    "with space.py": SHOW,
    "package/__init__.py": "print('package', __name__)\n",
    "package/__main__.py": SHOW,
    "package/module.py": "from . import other\n" + SHOW,
    "package/other.py": "",
    "deep/down/show.py": SHOW,
    "folder/__main__.py": SHOW,
    "empty/nothing.txt": "",
    "raise.py": RAISE,
    "main.py": IN_MAIN,
}

CASES = {
    "names": Case(("show.py", "a", "-b", "--c=d")),
    "relative path": Case(("./deep/../show.py",)),
    "in a folder": Case(("deep/down/show.py", "x")),
    "absolute path": Case(("{folder}/show.py",)),
    "path with spaces": Case(("with space.py", "a b")),
    "a link": Case(("link.py",)),
    "module": Case(("-m", "show", "a", "-m")),
    "package": Case(("-m", "package", "a")),
    "module of a package": Case(("-m", "package.module")),
    "folder with a main": Case(("folder", "a")),
    "zip file with a main": Case(("archive.zip", "a")),
    "compiled": Case(("compiled.pyc",)),
    "docstring and future": Case(
        ("doc.py",), {"doc.py": '"""Mine."""\nfrom __future__ import annotations\nx: int = 3\n' + SHOW}
    ),
    "no future of ours": Case(("ann.py",), {"ann.py": "def f(x: int): ...\nprint(f.__annotations__)\n"}),
    "exit None": Case(("x.py",), {"x.py": "import sys; sys.exit()"}),
    "exit 3": Case(("x.py",), {"x.py": "import sys; sys.exit(3)"}),
    "exit text": Case(("x.py",), {"x.py": "import sys; sys.exit('text')"}),
    "exit 300": Case(("x.py",), {"x.py": "raise SystemExit(300)"}),
    "_exit": Case(("x.py",), {"x.py": "import os; print('x', end=''); os._exit(7)"}),
    "killed": Case(("x.py",), {"x.py": "import os; os.kill(os.getpid(), 9)"}),
    "aborted": Case(("x.py",), {"x.py": "import os, resource; resource.setrlimit(4, (0, 0)); os.abort()"}),
    "exception": Case(("raise.py",)),
    "exception in a module": Case(("-m", "raise")),
    "chained exception": Case(("x.py",), {"x.py": CHAINED}),
    "base exception": Case(("x.py",), {"x.py": "class Own(BaseException): ...\nraise Own('x')\n"}),
    "exception without words": Case(("x.py",), {"x.py": "class E(Exception):\n  __str__ = None\nraise E\n"}),
    "exception group": Case(("x.py",), {"x.py": "raise ExceptionGroup('g', [ValueError(1)])\n"}),
    "Ctrl-C": Case(("x.py",), {"x.py": "import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)\n"}),
    "Ctrl-C in a module": Case(("-m", "x"), {"x.py": "raise KeyboardInterrupt\n"}),
    "own hook": Case(("x.py",), {"x.py": HOOK}),
    "hook that exits": Case(("x.py",), {"x.py": "import sys\nsys.excepthook = lambda *_: sys.exit(5)\n1 / 0\n"}),
    "exception at exit": Case(("x.py",), {"x.py": "import atexit\natexit.register(lambda: 1 / 0)\n"}),
    "syntax error": Case(("x.py",), {"x.py": "a = (\n"}),
    "syntax error in a module": Case(("-m", "x"), {"x.py": "a = (\n"}),
    "no such file": Case(("nowhere.py",)),
    "no such module": Case(("-m", "nowhere")),
    "package without a main": Case(("-m", "deep.down")),
    "folder without a main": Case(("empty",)),
    "end of a process": Case(("x.py",), {"x.py": AT_EXIT}),
    "fork": Case(("main.py", "fork")),
    "spawn": Case(("main.py", "spawn")),
    "forkserver": Case(("main.py", "forkserver")),
    "spawn from a module": Case(("-m", "main", "spawn")),
    "fork from a package": Case(("-m", "pack", "fork"), {"pack/__init__.py": "", "pack/__main__.py": IN_MAIN}),
    "modules beside the script": Case(
        ("x.py",),
        {"x.py": NEIGHBOURS}
        | {f"{name}.py": f"a = {name!r}\n" for name in re.findall(r"[a-z]+", NEIGHBOURS.split("\n")[0])[1:]},
    ),
    "first free descriptor": Case(("x.py",), {"x.py": OPEN}),
    "signal dispositions": Case(("x.py",), {"x.py": SIGNALS}),
    "waits for a signal": Case(("x.py",), {"x.py": SIGWAIT}),
    "reads stdin": Case(("x.py",), {"x.py": "print(input())\n"}, stdin="line\n"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "link.py").symlink_to(folder / "deep/down/show.py")
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    py_compile.compile(str(folder / "show.py"), str(folder / "compiled.pyc"), "show.py")
    return folder


def run(how: tuple[str, ...], case: Case, folder: Path, **variables: str) -> tuple[int, str, str, str]:
    """Exit code, stdout, stderr and what the script left in `unclosed.txt`."""
    words = [word.format(folder=folder) for word in case.words]
    left = folder / "unclosed.txt"
    left.unlink(missing_ok=True)
    environ = clean_environment(PYTHONHASHSEED="0", **variables)
    done = program.run([sys.executable, *how, *words], folder=folder, environ=environ, input=case.stdin)
    out, err = (re.sub(r"0x[0-9a-f]+|\d{12,}", "ADDRESS", text) for text in (done.stdout, done.stderr))
    return done.returncode, out, err, left.read_text() if left.exists() else ""


@pytest.mark.parametrize("name", CASES)
def test_as_under_plain_python(monitor: FakeMonitor, tmp_path: Path, folder: Path, name: str) -> None:
    case = CASES[name]
    if "exception group" in name and sys.version_info < (3, 11):
        pytest.skip("no exception groups before Python 3.11")
    for path, text in case.files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    watched = {
        env.RANK_MONITOR_SOCKET: str(monitor.path),
        env.STACK_FILE: str(tmp_path / "stacks"),
        env.STACK_SIGNAL: "41",
    }
    expected = run(PLAIN, case, folder)
    assert run(BOOTSTRAP, case, folder, **watched) == expected
    until(lambda: monitor.connections == 1, "the connection of the bootstrap")


@pytest.mark.parametrize("name", ["names", "module", "folder with a main"])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="no safe path before Python 3.11")
def test_in_safe_path_mode(folder: Path, name: str) -> None:
    case, variables = CASES[name], {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder)}
    assert run(BOOTSTRAP, case, folder, **variables) == run(PLAIN, case, folder, **variables)


@pytest.mark.parametrize("name", ["names", "in a folder", "exception", "module", "package"])
def test_started_by_its_path(folder: Path, name: str) -> None:
    modules = ["ft_client"]
    if name != "exception" or sys.version_info < (3, 13):  # from then on the interpreter needs them for a traceback
        modules += ["types", "runpy", "contextlib"]
    if "-m" not in CASES[name].words:
        for module in modules:  # plain python loads none of them
            (folder / f"{module}.py").write_text("raise SystemExit('a file of the current folder was loaded')")
    by_path = ("-u", str(Path(bootstrap.__file__)))
    assert run(by_path, CASES[name], folder) == run(PLAIN, CASES[name], folder)


@pytest.mark.parametrize("words", [(), ("-m",)])
def test_a_command_line_without_a_script_is_an_error(folder: Path, words: tuple[str, ...]) -> None:
    code, _, stderr, _ = run(BOOTSTRAP, Case(words), folder)
    assert code == 1
    assert stderr.startswith("usage: ")
