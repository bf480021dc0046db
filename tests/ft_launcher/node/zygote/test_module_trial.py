"""The trial of imports in a child: what is taken and what is left out, and what the process that learns has then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.program import ROOT, clean_environment, run

MODULES = {
    "fine": "import atexit, os\natexit.register(print, 'bye')\nos.environ['FINE'] = '1'",
    "part/__init__": "",
    "part/fine": "import fine",
    "reads": "import os\nos.environ.get('LOCAL_RANK')",
    "needs": "import thread_starts",
    "thread_starts": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "opens": "import os\ndescriptor = os.open('/dev/null', 0)",
    "prints": "print('hello')",
    "seeds": "import random\nrandom.seed(1)",
    "seeds_torch": "import torch\ntorch.manual_seed(1)",
    "at_fork": "import os\nos.register_at_fork(before=lambda: None)",
    "asks_pid": "import os\nme = os.getpid()",
    "handles": "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)",
    "hooks": "import sys\nsys.excepthook = print",
    "finds": "import sys\nsys.path.append('/nowhere')",
    "exchanges": "import json\nusual = json.dumps\njson.dumps = lambda *words: usual(*words)\n"
    "json.JSONEncoder.mine = True\ndel json.JSONDecoder.raw_decode",
    "exchanges_too": "import colorsys\ncolorsys.rgb_to_hsv = len",
    "exchanges_again": "import colorsys\ncolorsys.rgb_to_hsv = repr",
    "exchanges_main": "import __main__\n__main__.mine = 1",
    "exchanges_import": "import builtins\nusual = builtins.__import__\n"
    "builtins.__import__ = lambda *words, **others: usual(*words, **others)",
    "replaces": "import sys, types\nsys.modules['colorsys'] = types.ModuleType('colorsys')",
    "has_table": "import copyreg\ncopyreg.pickle(complex, lambda one: (complex, (1, 2)))",
    "configures": "import logging\nlogging.getLogger().setLevel(10)",
    "names_level": "import logging\nlogging.addLevelName(5, 'TRACE')",
    "turns_filters": "import warnings\nwarnings.filters.reverse()",
    "takes_id": "import uuid\nme = uuid.uuid4()",
    "takes_token": "import secrets\nme = secrets.token_hex()",
    "codes": "import codecs\ncodecs.register(lambda name: None)",
    "writes": "open('written', 'w').close()",
    "has_folder": "import tempfile\nfolder = tempfile.mkdtemp()",
    "runs": "import subprocess\nsubprocess.run(['true'])",
    "asks_network": "import socket\nsocket.getaddrinfo('127.0.0.1', 80)",
    "starts_otherwise": "import multiprocessing\nmultiprocessing.set_start_method('spawn')",
    "has_device": "import torch\ntorch.set_default_device('meta')",
    "fails": "1 / 0",
    "leaves": "raise SystemExit(3)",
}
LEFT_OUT = {
    "reads": "its import reads LOCAL_RANK, which differs in ranks or is changed by the script",
    "thread_starts": "its import changes the threads or signals of the process",
    "opens": "its import changes an open file or socket",
    "prints": "its import changes what is printed",
    "seeds": "its import changes the state of random",
    "seeds_torch": "its import changes the state of torch",
    "at_fork": "its import registers a function for forks",
    "asks_pid": "its import asks for the process id",
    "handles": "its import changes the threads or signals of the process",
    "hooks": "its import changes a hook of sys",
    "finds": "its import changes sys.path",
    "exchanges_too": "its import exchanges colorsys.rgb_to_hsv, which another import exchanges too",
    "exchanges_again": "its import exchanges colorsys.rgb_to_hsv, which another import exchanges too",
    "exchanges_main": "its import exchanges __main__.mine",
    "exchanges_import": "its import changes builtins.__import__",
    "replaces": "its import changes a module that is loaded already",
    "has_table": "its import changes how objects of Python are pickled",
    "configures": "its import changes a logger that is there already",
    "names_level": "its import changes a logger that is there already",
    "turns_filters": "its import changes the filters of warnings that are there already",
    "takes_id": "its import takes random bytes",
    "takes_token": "its import takes random bytes",
    "codes": "its import registers a codec",
    "writes": "its import writes a file",
    "has_folder": "its import writes a file",
    "runs": "its import starts a process",
    "asks_network": "its import uses the network",
    "starts_otherwise": "its import changes how processes are started",
    "has_device": "its import changes the state of torch",
    "fails": "its import failed (ZeroDivisionError)",
    "leaves": "its import failed (SystemExit)",
    "beside": "sys.path leads elsewhere for it",
    "no_such_module": "sys.path leads elsewhere for it",
}
PROGRAM = """
import colorsys, copyreg, json, os, sys, threading
sys.path[:0] = {folders!r}
from ft_launcher.node.zygote import fork_server, module_trial
from ft_launcher.node.zygote.first_import import imports
from ft_launcher.node.zygote.learned_modules import Surroundings
fork_server.load_torch()
imports.undo()
names = [name.replace("/", ".").removesuffix(".__init__") for name in {names!r}]
learned = module_trial.learn(names, Surroundings(["LOCAL_RANK"]), lambda: None)
imports.undo()
here = [name for name in names if name in sys.modules]
def exchanged():
    names = vars(json.JSONEncoder), vars(json.JSONDecoder)
    return [json.dumps.__name__, "mine" in names[0], "raw_decode" in names[1]]
before = exchanged()
import exchanges
print(json.dumps([learned, here, os.environ.get("FINE"), threading.active_count(), before, exchanged()]))
"""


def test_what_a_script_could_tell_is_left_out(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    for name, code in MODULES.items():
        file = installed / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    (tmp_path / "beside.py").write_text("")
    names = [*MODULES, "beside", "no_such_module"]
    folders = [str(installed), str(tmp_path), str(ROOT), str(ROOT / "client")]
    program = PROGRAM.format(folders=folders, names=names)
    ended = run([sys.executable, "-c", program], folder=tmp_path, environ=clean_environment(), limit_s=120)
    assert ended.returncode == 0, ended
    learned, here, variable, threads, before, after = json.loads(ended.stdout.splitlines()[0])
    assert learned["left_out"] == LEFT_OUT
    assert learned["names"] == ["fine", "part", "part.fine", "exchanges"]
    assert (before, after) == (["dumps", False, True], ["<lambda>", True, False]), "exchanged at the script's import"
    assert (here, variable, threads) == ([], None, 1), "hidden, and the trial was another process"
