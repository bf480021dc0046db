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
    "fails": "its import failed (ZeroDivisionError)",
    "leaves": "its import failed (SystemExit)",
    "beside": "sys.path leads elsewhere for it",
    "no_such_module": "sys.path leads elsewhere for it",
}
PROGRAM = """
import json, os, sys, threading
sys.path[:0] = {folders!r}
from ft_launcher.zygote import fork_server, module_trial
from ft_launcher.zygote.first_import import imports
from ft_launcher.zygote.learned_modules import Surroundings
fork_server.load_torch()
imports.take_back()
names = [name.replace("/", ".").removesuffix(".__init__") for name in {names!r}]
learned = module_trial.learn(names, Surroundings(["LOCAL_RANK"]), lambda: None)
imports.take_back()
here = [name for name in names if name in sys.modules]
print(json.dumps([learned, here, os.environ.get("FINE"), threading.active_count()]))
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
    learned, here, variable, threads = json.loads(ended.stdout.splitlines()[0])
    assert learned["left_out"] == LEFT_OUT
    assert learned["names"] == ["fine", "part", "part.fine"]
    assert (here, variable, threads) == ([], None, 1), "hidden, and the trial was another process"
