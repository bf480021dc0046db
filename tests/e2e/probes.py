"""Small scripts that show what a program can see of how it was started, and of how it ends. Judges nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Probe:
    """A script by the words that run it, with files it needs and variables it gets."""

    name: str
    source: str = ""
    words: tuple[str, ...] = ("probe.py",)
    files: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


SHOW = """
import sys
loader = type(__loader__).__name__ if not isinstance(__loader__, type) else __loader__.__name__
names = {name: value for name, value in globals().items() if name not in ("sys", "loader", "__loader__")}
print(names.pop("__spec__") and (__spec__.name, __spec__.origin, __spec__.parent), loader)
print(names, sys.modules["__main__"].__dict__ is globals())
print(sys.argv, sys.path, sys.orig_argv, sys.flags, sys.executable)
"""

STATE = """
import ctypes, gc, os, resource, signal, sys, threading, time
print(sorted((k, v) for k, v in os.environ.items() if k != "_"))
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(libc.getenv(b"MASTER_ADDR"), libc.getenv(b"HOME"))
environ = open("/proc/self/environ", "rb").read().split(bytes(1))
print(sorted(entry for entry in environ if not entry.startswith(b"_=")))
print(os.getcwd(), os.umask(0o22), sorted(os.sched_getaffinity(0)), os.nice(0))
print(os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), threading.main_thread().native_id == os.getpid())
print([(number, str(signal.getsignal(number))) for number in sorted(signal.valid_signals())])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(open("/proc/self/comm").read(),
      [word for word in open("/proc/self/cmdline").read().split(chr(0)) if "bootstrap" not in word])
print(status["SigBlk"], status["SigIgn"], status["NoNewPrivs"])
print([resource.getrlimit(number) for number in range(16)])
print(gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval(), sys.dont_write_bytecode)
print(threading.enumerate(), threading.current_thread() is threading.main_thread(), threading.active_count())
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 200))
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.getprofile(), sys.gettrace())
print(hasattr(sys, "ps1"), hasattr(sys, "last_value"), sys.warnoptions, sys._xoptions, sys.stdin.isatty())
import faulthandler, multiprocessing, tracemalloc, asyncio
print(faulthandler.is_enabled(), tracemalloc.is_tracing(), multiprocessing.get_start_method(allow_none=True))
print(multiprocessing.current_process(), multiprocessing.parent_process(), multiprocessing.active_children())
print(os.times().children_user, time.process_time() < 5)
def depth(n=0):
    try:
        return depth(n + 1)
    except RecursionError:
        return n
print(900 < depth() < 1000)
"""

STREAMS = """
import ctypes, os, sys
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through,
          stream.newlines, stream.isatty(), stream.fileno(), type(stream.buffer).__name__, repr(stream))
    print(stream.buffer)
print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__, repr(sys.stdin.read()))
ctypes.CDLL(None).printf(b"by C, ")
print("no end of line", end="")
sys.stderr.write("nor here: \\u00e4")
os._exit(5)
"""

AT_EXIT = """
import atexit, concurrent.futures, ctypes, logging, sys, threading, time, weakref
import torch
atexit.register(print, "first registered")
atexit.register(print, "second registered")
worked = threading.Event()
def late():
    threading.main_thread().join()
    worked.wait()
    print("a thread that python waits for", threading.main_thread().is_alive())
threading.Thread(target=late).start()
def beside():
    while True:
        time.sleep(0.001)
if sys.argv[1:]:
    threading.Thread(target=beside, daemon=True).start()
print(threading.enumerate(), threading.active_count(), threading.current_thread() is threading.main_thread())
ended = threading.Event()
def work():
    ended.wait()
    time.sleep(0.05)
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(work).add_done_callback(lambda done: (print("the pool's work is done"), worked.set()))
class Last:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print("destroyed", self.name, threading.__name__)
first, second = Last("first"), Last("second")
cycle = Last("in a cycle")
cycle.itself = cycle
_private = Last("private")
weakref.finalize(first, print, "finalized")
file = open("written.txt", "w")
file.write("flushed")
held = [open("written_too.txt", "w")]
held.append(held)
held[0].write("flushed too")
logging.getLogger("x").warning("by logging")
libc = ctypes.CDLL(None)
libc.puts(b"by puts")
libc.fopen.restype = ctypes.c_void_p
by_c = libc.fopen(b"written_by_c", b"w")
libc.fputs(b"flushed by C", ctypes.c_void_p(by_c))
print("end")
ended.set()
"""

IN_MAIN = """
import multiprocessing, os, pickle, sys

class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x)

def main(method):
    print(pickle.dumps(Point(3)), pickle.loads(pickle.dumps(Point(3))).x)
    multiprocessing.set_start_method(method)
    with multiprocessing.Pool(1) as pool:
        print(pool.map(double, [Point(1), Point(2)])[1].x)
    queue = multiprocessing.SimpleQueue()
    child = multiprocessing.Process(target=queue.put, args=(3,))
    child.start()
    print(queue.get(), child.join(), child.exitcode, child.name)

if __name__ == "__main__":
    print("run as", __name__, flush=True)
    main(sys.argv[1])
"""

FORKS = """
import atexit, os, sys
atexit.register(lambda: print("at exit in", who))
who = "parent"
child = os.fork()
if child == 0:
    who = "child"
    file = open("written_by_child", "w")
    file.write("x")
    sys.exit(3)
print(os.waitpid(child, 0)[1] >> 8, open("written_by_child").read())
if os.fork() == 0:
    raise ValueError("in the child")
print(os.wait()[1] >> 8)
"""

HOOK = """
import sys, traceback
def hook(kind, error, trace):
    print("mine:", kind.__name__, error, [frame.name for frame in traceback.extract_tb(trace)])
    print(error.__traceback__ is trace, sys.last_traceback is trace)
    {last}
sys.excepthook = hook
def inner(): raise KeyError("x")
inner()
"""

THREAD_RAISES = """
import threading
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
def leave():
    raise SystemExit(9)
thread = threading.Thread(target=leave)
thread.start()
thread.join()
print("goes on")
"""

TORCH = """
import torch
torch.manual_seed(3)
print(torch.initial_seed(), torch.rand(3), torch.get_num_threads(), torch.get_num_interop_threads())
print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.multiprocessing.get_sharing_strategy())
weights = torch.ones(200, 200, requires_grad=True)
(weights @ weights).sum().backward()
print(weights.grad.sum(), torch.cuda.is_initialized())
print(torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.zeros(2)))
"""

LOADERS = """
import sys
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index ** 2)

if __name__ == "__main__":
    for method in sys.argv[1:]:
        loader = torch.utils.data.DataLoader(Squares(), 4, num_workers=1, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
"""

SEEDS = """
import multiprocessing, random, secrets, tempfile, uuid
import numpy, torch
print(torch.initial_seed(), torch.rand(1).item())
print(random.random(), numpy.random.rand(), secrets.token_hex(), uuid.uuid4(), uuid.uuid1().node > 0)
print(bytes(multiprocessing.current_process().authkey).hex(), tempfile.mktemp(), random.Random().random())
"""

PACKAGE = {
    "package/__init__.py": "print('package', __name__)\n",
    "package/module.py": SHOW,
    "package/__main__.py": SHOW,
}

PROBES = [
    Probe("script", SHOW, ("probe.py", "a b", "-m", "ä")),
    Probe("absolute path", SHOW, ("./../place/probe.py",)),
    Probe("spaces and umlauts", "", ("sub folder/sö.py", "x"), files={"sub folder/sö.py": SHOW}),
    Probe("module", "", ("-m", "package.module", "-x"), files=PACKAGE),
    Probe("package", "", ("-m", "package", "y"), files=PACKAGE),
    Probe("folder", "", ("package", "y"), files=PACKAGE),
    Probe("no module", "", ("-m", "no_such_module")),
    Probe("no script", "", ("no_such_script.py",)),
    Probe("state", STATE, environ={"MASTER_ADDR": "gi=ven", "FT_X": "", "RANK": "0"}),
    Probe("streams", STREAMS),
    Probe("at exit", AT_EXIT),
    Probe("at exit beside a daemon", AT_EXIT, ("probe.py", "daemon")),
    Probe("multiprocessing fork", IN_MAIN, ("probe.py", "fork")),
    Probe("multiprocessing spawn", IN_MAIN, ("probe.py", "spawn")),
    Probe("multiprocessing forkserver", IN_MAIN, ("probe.py", "forkserver")),
    Probe("multiprocessing spawn by -m", IN_MAIN, ("-m", "probe", "spawn")),
    Probe("forks", FORKS),
    Probe("excepthook", HOOK.format(last="")),
    Probe("excepthook that exits", HOOK.format(last="sys.exit(7)")),
    Probe("exceptions in threads", THREAD_RAISES),
    Probe("exit 3", "import sys; sys.exit(3)"),
    Probe("exit -1", "import sys; sys.exit(-1)"),
    Probe("exit 300", "import sys; sys.exit(300)"),
    Probe("exit True", "import sys; sys.exit(True)"),
    Probe("exit None", "import sys; sys.exit()"),
    Probe("exit with words", "import sys; sys.exit('why not')"),
    Probe("exit with a tuple", "raise SystemExit(1, 2)"),
    # From Python 3.13 on the interpreter complains of it, in words that depend on the modules that it has loaded.
    Probe("exit huge", "import sys; sys.stderr = None; sys.exit(1 << 70)"),
    Probe("os._exit", "import os, atexit; atexit.register(print, 'no'); print('x', end=''); os._exit(4)"),
    Probe("C's exit", "import ctypes, atexit; atexit.register(print, 'no'); ctypes.CDLL(None).exit(6)"),
    Probe("interrupt", "raise KeyboardInterrupt"),
    Probe("SIGINT", "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"),
    Probe("SIGTERM", "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)"),
    Probe("SIGPIPE", "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')"),
    Probe("abort", "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.abort()"),
    Probe(
        "at exit an exit", "import atexit, sys\natexit.register(lambda: sys.exit(3))\natexit.register(lambda: 1 / 0)"
    ),
    Probe(
        "chained", "def f():\n  1 / 0\ntry:\n  f()\nexcept ZeroDivisionError as e:\n  raise RuntimeError('2') from e\n"
    ),
    Probe("group", "class Odd(Exception):\n  def __str__(self): raise ValueError\nraise Odd"),
    Probe("syntax error", "def f(:\n  pass\n"),
    Probe("stdout closed", "import sys\nprint('x')\nsys.stdout.close()"),
    Probe("descriptor 1 closed", "import os\nprint('x')\nos.close(1)"),
    Probe("breakpoint", "breakpoint()\nprint('not here')"),
    Probe("faulthandler", "import faulthandler, sys\nfaulthandler.enable()\nprint(faulthandler.is_enabled())"),
    Probe("input", "input('? ')"),
    Probe(
        "exec of another",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import os; print(os.getcwd())'])",
    ),
    Probe(
        "subprocess",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import sys; print(sys.flags, sys.path)'])",
    ),
    Probe(
        "neighbours",
        "import client, config, utils, link, process, stacks\nprint(client.a, config.a, utils.a, process.a)\n",
        files={f"{name}.py": "a = __name__" for name in ("client", "config", "utils", "link", "process", "stacks")},
    ),
    Probe("warnings", "import warnings\nwarnings.warn('mind')\nwarnings.warn('old', DeprecationWarning)"),
    Probe("resource warning", "open('probe.py')\n"),
    Probe("unraisable", "class A:\n  def __del__(self): 1 / 0\na = A()\ndel a\n"),
    Probe(
        "thread in the end",
        "import threading\ndef f():\n  threading.main_thread().join()\n  1 / 0\nthreading.Thread(target=f).start()",
    ),
    Probe("torch", TORCH),
    Probe("loaders of data", LOADERS, ("probe.py", "fork", "spawn", "forkserver")),
]
