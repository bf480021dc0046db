"""What people write above `import torch`, and a report of all that can be seen before and after it. Judges nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.e2e.probes import Probe

REPORT = """
import atexit, builtins, codecs, ctypes, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, random
import resource, signal, socket, sys, tempfile, threading, tracemalloc, types, warnings, zlib

OURS = {"ft_client", "ft_launcher", "rank_monitor"}
STARTED = {"atexit", "builtins", "codecs", "copyreg", "json", "locale", "logging", "os", "random", "signal", "warnings"}
UNEQUAL = {"__annotations__", "__builtins__", "__cached__", "__slotnames__", "__warningregistry__"}


def name_of(thing):
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__


def logger_of(logger):
    parent = logger.parent.name if logger.parent else None
    kinds = [type(handler).__name__ for handler in logger.handlers]
    return [logger.level, logger.disabled, logger.propagate, kinds, len(logger.filters), parent]


def c_environment():
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    place, found = 0, []
    while entries[place]:
        found.append(entries[place].decode())
        place += 1
    return sorted(entry for entry in found if not entry.startswith("_="))


def kind_of(value):
    # What two processes may share: no address, no state. By types: some objects load something when they are asked.
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if type(value) is types.FunctionType:
        return ["function", value.__qualname__, value.__code__.co_filename, value.__code__.co_firstlineno]
    if issubclass(type(value), logging.Logger):  # its class differs where the script sets one before torch is imported
        return ["Logger", value.name]
    return [type(value).__name__, value.__qualname__ if type(value) is type else ""]


def names_of(holder):
    return sorted([name, kind_of(value)] for name, value in vars(holder).items()
                  if isinstance(name, str) and not issubclass(type(value), types.ModuleType) and name not in UNEQUAL
                  and (hasattr(type(value), "__call__") or not name.startswith("_")))


def names_of_modules():
    # Each module and each of its classes -> a sum over their names.
    found = {}
    for title in [title for title in sys.modules if title.partition(".")[0] in {"torch", "numpy", *STARTED}]:
        module = sys.modules[title]
        if type(module) is types.ModuleType:
            found[title] = zlib.crc32(json.dumps(names_of(module)).encode())
            for name, value in list(vars(module).items()):
                if issubclass(type(value), type) and vars(value).get("__module__") == title:
                    found[f"{title}.{name}"] = zlib.crc32(json.dumps(names_of(value)).encode())
    return found


def state():
    loaded = set(sys.modules)
    known = logging.root.manager.loggerDict
    loggers = {name: logger_of(one) for name, one in known.items() if isinstance(one, logging.Logger)}
    loggers = {name: found for name, found in loggers.items() if name.partition(".")[0] not in OURS}
    roots = {name.partition(".")[0] for name in loaded}
    foreign = roots - set(sys.stdlib_module_names) - {"report", "__main__", "__mp_main__"} - OURS
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {
        "packages": sorted(foreign),
        "modules of packages": sorted(n for n in loaded if n.partition(".")[0] in {"torch", "numpy", "tqdm"}),
        "modules of Python": sorted(n for n in loaded if n.partition(".")[0] in sys.stdlib_module_names),
        "names of modules": names_of_modules(),
        "loggers": loggers,
        "root logger": logger_of(logging.root) + [logging.root.manager.disable],
        "places of loggers": sorted(n for n in known.keys() - loggers.keys() if n.partition(".")[0] not in OURS),
        "handlers": [type(one()).__name__ for one in logging._handlerList],
        "logger class": [name_of(logging.getLoggerClass()), name_of(logging.root.manager.loggerClass)],
        "filters of warnings": [list(map(str, one)) for one in warnings.filters],
        "how warnings are shown": name_of(warnings.showwarning),
        "hooks": [name_of(hook) for hook in (sys.excepthook, sys.displayhook, sys.unraisablehook, sys.breakpointhook,
                  threading.excepthook, sys.gettrace(), sys.getprofile(), builtins.__import__)],
        "finders": [name_of(one) for one in sys.meta_path if type(one).__module__.partition(".")[0] not in OURS],
        "path hooks": [name_of(one) for one in sys.path_hooks],
        "path": sys.path,
        "argv": [sys.argv, sys.orig_argv],
        "threads": [[one.name, one.daemon] for one in threading.enumerate()] + [threading.stack_size()],
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 200),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "signals of the kernel": [status[key].strip() for key in ("SigBlk", "SigIgn")],
        "environment": sorted(item for item in map("=".join, os.environ.items()) if not item.startswith("_=")),
        "environment of C": c_environment(),
        "flags": [str(sys.flags), sys.warnoptions, str(sys._xoptions)],
        "codecs": [codecs.lookup("utf-8").name, sys.getfilesystemencoding(), sys.stdout.encoding, sys.stderr.errors],
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "frozen by gc": gc.get_freeze_count() > 0,
        "exit functions": atexit._ncallbacks(),
        "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags(),
                        sys.dont_write_bytecode, getattr(sys, "get_int_max_str_digits", int)()],
        "tools": [faulthandler.is_enabled(), tracemalloc.is_tracing()],
        "multiprocessing": [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name],
        "process": [os.getcwd(), os.umask(0o22), sorted(os.sched_getaffinity(0)), os.nice(0)],
        "decimal": str(decimal.getcontext()),
        "tempfile": tempfile.tempdir,
        "sockets": socket.getdefaulttimeout(),
    }


def of_torch():
    import numpy, torch
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    return {
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "numbers": [random.random(), float(numpy.random.rand()), float(torch.rand(1))],
        "torch": [str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
                  torch.cuda.is_initialized(), torch.multiprocessing.get_sharing_strategy()],
    }


def tell(**phases):
    print("REPORT", json.dumps(phases))
"""

END = """
import report
before = report.state()
import torch
after = report.state()
report.tell(before=before, after={**after, **report.of_torch()})
"""


LEARNED_END = """
import report
before = report.state()
import torch
after = report.state()
import torch._dynamo
later = report.state()
report.tell(before=before, after=after, later={**later, **report.of_torch()})
"""


@dataclass(frozen=True)
class Prologue:
    """Lines above `import torch`.

    Attributes:
        again: what the rank says of why it starts again by exec; empty: it stays a fork.
        slow: it is not a case of its own kind.
    """

    name: str
    lines: str
    again: str = ""
    files: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ("probe.py",)
    slow: bool = True

    def __str__(self) -> str:
        return self.name

    def probe(self, end: str = END) -> Probe:
        """The script."""
        return Probe(self.name, self.lines + end, self.words, {"report.py": REPORT, **self.files})


SETTINGS = {"settings.py": "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n"}
OMP = "the script changes OMP_NUM_THREADS before it imports torch"
DICT_CONFIG = """
import logging.config
logging.config.dictConfig({"version": 1, "root": {"level": "INFO", "handlers": ["out"]}, "loggers": {"mine": {}},
    "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}}})
"""
HYDRA = """
import logging, logging.config
logging.config.dictConfig({"version": 1, "formatters": {"simple": {"format": "[%(asctime)s][%(name)s] %(message)s"}},
    "handlers": {"file": {"class": "logging.FileHandler", "formatter": "simple", "filename": "written.log"}},
    "root": {"level": "INFO", "handlers": ["file"]}, "disable_existing_loggers": False})
log = logging.getLogger(__name__)
"""
BEFORE_LEARNED = [
    Prologue("dictConfig", DICT_CONFIG),
    Prologue("variables of others", "import os\nos.environ['HF_HOME'] = '/tmp'\nimport numpy\nnumpy.random.seed(3)\n"),
    Prologue("sympy first", "import sympy, warnings\nwarnings.simplefilter('ignore')\n"),
    Prologue("a variable of its own", "import os\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\n", "TORCHDYNAMO_VERBOSE"),
]
"""Lines above `import torch` and `import torch._dynamo`, where both were imported before the fork."""
PROLOGUES = [
    Prologue("nothing", "", slow=False),
    Prologue("literal", "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n", OMP),
    Prologue("local module", "import settings\n", OMP, SETTINGS, slow=False),
    Prologue("merged", "import os\nos.environ |= {'OMP_NUM_THREADS': '2'}\n", OMP),
    Prologue(
        "updated by a function",
        "import os\ndef f(): return {'MKL_NUM_THREADS': '2', 'MINE': '1'}\nos.environ.update(f())\n",
        "MKL_NUM_THREADS",
    ),
    Prologue("removed", "import os\ndel os.environ['OMP_NUM_THREADS']\n", OMP, slow=False),
    Prologue("putenv", "import os\nos.putenv('OMP_NUM_THREADS', '2')\n", OMP),
    Prologue("read by Python code", "import os\nos.environ['TORCH_LOGS'] = '+dynamo'\n", "TORCH_LOGS"),
    Prologue(
        "dotenv",
        "from dotenv import load_dotenv\nload_dotenv()\n",
        "OMP_WAIT_POLICY",
        {".env": "OMP_WAIT_POLICY=passive\nMINE=1\n"},
        slow=False,
    ),
    Prologue("import_module", "import importlib, settings\nimportlib.import_module('torch')\n", OMP, SETTINGS),
    Prologue("from", "import settings\nfrom torch import nn\n", OMP, SETTINGS),
    Prologue(
        "a library imports torch", "import settings, library\n", OMP, SETTINGS | {"library.py": "import torch.nn\n"}
    ),
    Prologue("module", "import settings\n", OMP, SETTINGS, ("-m", "probe", "--x")),
    Prologue(
        "much is changed",
        "import os, resource, signal, sys, settings\nos.chdir('/')\nos.umask(0o77)\nsignal.alarm(600)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "os.set_inheritable(os.open('/dev/null', 0), True)\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n",
        OMP,
        SETTINGS,
        slow=False,
    ),
    Prologue("forks", "import settings, os\nif not os.fork():\n  import torch\n  os._exit(torch.get_num_threads())\n"
             "print(os.wait()[1])\n", "the script changes OMP_NUM_THREADS before it forks", SETTINGS),
    Prologue("from a thread", "import settings, threading\nt = threading.Thread(target=__import__, args=('torch',))\n"
             "t.start(); t.join()\n", OMP, SETTINGS),
    Prologue("asked only whether torch is there", "import importlib.util\nfound = importlib.util.find_spec\n"
             "assert found('torch') and found('torch').origin\nimport settings\n", OMP, SETTINGS),
    Prologue("another tqdm in sys.path", "import sys\nsys.path.insert(0, 'vendor')\nimport tqdm\nassert tqdm.mine\n",
             "another tqdm", {"vendor/tqdm.py": "mine = 1\nfrom types import SimpleNamespace as tqdm\n"}),
    Prologue("variables of others", "import os\nos.environ['WANDB_MODE'] = 'offline'\n"
             "os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')\nos.environ['HF_HOME'] = '/tmp'\n", slow=False),
    Prologue("argparse", "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', type=int)\n"
             "args = parser.parse_args()\n", words=("probe.py", "--x", "3")),
    Prologue("hydra", HYDRA),
    Prologue("numpy first", "import numpy as np\nnp.random.seed(3)\nimport tqdm\n", slow=False),
    Prologue("basicConfig", "import logging\nlogging.basicConfig(level=logging.DEBUG, format='%(message)s')\n"),
    Prologue("dictConfig", DICT_CONFIG, slow=False),
    Prologue("fileConfig", "import logging.config\nlogging.config.fileConfig('log.ini')\n", files={"log.ini":
             "[loggers]\nkeys=root\n[handlers]\nkeys=h\n[formatters]\nkeys=\n[logger_root]\nlevel=INFO\nhandlers=h\n"
             "[handler_h]\nclass=StreamHandler\nargs=(sys.stderr,)\n"}),
    Prologue("loggers of torch", "import logging\nlogging.getLogger('torch').setLevel(logging.ERROR)\n"
             "logging.getLogger('torch.fx').setLevel(logging.ERROR)\nlogging.getLogger('asyncio').setLevel(50)\n"
             "logging.getLogger('torch.mine.x').addHandler(logging.NullHandler())\n", slow=False),
    Prologue("a class of loggers", "import logging\nclass Mine(logging.Logger): pass\nlogging.setLoggerClass(Mine)\n"
             "logging.getLogger('mine')\n"),
    Prologue("wandb-like", "import atexit, logging, os, sys, threading\nos.environ['WANDB_RUN_ID'] = 'x'\n"
             "logging.getLogger('wandb').addHandler(logging.FileHandler('written.log'))\n"
             "atexit.register(print, 'bye')\nsys.excepthook = lambda *args: print('mine')\n"
             "logging.captureWarnings(True)\n"
             "threading.Thread(target=threading.Event().wait, daemon=True, name='pump').start()\n"),
    Prologue("spawn", "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n"),
    Prologue("forkserver", "import multiprocessing\nmultiprocessing.set_start_method('forkserver')\n"),
    Prologue("ignored warnings", "import warnings\nwarnings.filterwarnings('ignore')\n", slow=False),
    Prologue("warnings as errors", "import warnings\nwarnings.simplefilter('error', ResourceWarning)\n"
             "warnings.filterwarnings('once', category=DeprecationWarning, append=True)\n"),
    Prologue("faulthandler", "import faulthandler, tracemalloc\nfaulthandler.enable()\ntracemalloc.start(1)\n"),
    Prologue("locale", "import decimal, locale\nlocale.setlocale(locale.LC_ALL, '')\n"
             "decimal.getcontext().prec = 9\n"),
    Prologue("seeds", "import random\nimport numpy\nrandom.seed(1)\nnumpy.random.seed(1)\n"),
    Prologue("signals and exit", "import atexit, signal, sys\nsignal.signal(signal.SIGUSR1, lambda *a: None)\n"
             "signal.signal(signal.SIGTERM, lambda *a: sys.exit(1))\natexit.register(print, 'bye')\n"),
    Prologue("limits", "import resource, socket, sys, threading\nsys.setrecursionlimit(5000)\n"
             "socket.setdefaulttimeout(3)\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
             "threading.stack_size(1 << 20)\n"),
    Prologue("gc", "import gc\ngc.disable()\ngc.set_threshold(9999, 20, 20)\n"),
    Prologue("hooks", "import sys\nsys.path.append('/nowhere')\nsys.setswitchinterval(0.01)\n"
             "class Finder:\n  def find_spec(*a): pass\nsys.meta_path.insert(0, Finder())\nsys.settrace(None)\n"),
    Prologue("subprocess", "import subprocess, tempfile\nsubprocess.run(['true'])\n"
             "with tempfile.TemporaryDirectory() as folder: pass\n"),
]  # fmt: skip
