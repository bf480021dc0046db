"""Modules that a process has imported before a script looks: the script cannot tell, whatever it imports first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT, clean_environment, run

LIMIT_S = 60.0

INSTALLED = {
    "big/__init__.py": "value = 1\n",
    "big/core.py": """
import atexit, logging, os, warnings
import big.leaf, other.deep
from . import names
from .names import *
from importlib import import_module
import_module("late.one")
try:
    import big.breaks
except ImportError:
    pass
log = logging.getLogger("big.core")
log.setLevel(30)
log.addHandler(logging.NullHandler())
warnings.filterwarnings("ignore", message="of big")
os.environ.setdefault("BIG_CACHE", os.environ.get("BIG_HOME", "/home") + "/cache")
@atexit.register
def at_exit():
    print("big says bye")
""",
    "big/leaf.py": "import other.deep\n",
    "big/lazy.py": "def load():\n  import big.leaf\n  return big.leaf\nload()\n",
    "big/breaks.py": "import other.beside\nimport no_such_module\n",
    "big/names/__init__.py": "__all__ = ['one']\n",
    "big/names/one.py": "import sys, types\nsys.modules['big.made'] = types.ModuleType('big.made')\n",
    # Its attribute is a function of the same name, as is usual.
    "other/__init__.py": "from .deep import deep\n",
    "other/deep.py": "def deep(): return 1\n",
    "other/beside.py": "import other.second\n",
    "other/second.py": "",
    "late/__init__.py": "import importlib\ndef __getattr__(name):\n"
    "  if name.startswith('_'): raise AttributeError(name)\n  return importlib.import_module('.' + name, __name__)\n",
    "late/one.py": "import late.two\n",
    "late/two.py": "class Two: pass\n",
    "swaps/__init__.py": "",
    "swaps/names.py": "import json, big.leaf\nusual = json.dumps\ndef dumps(*words): return usual(*words)\n"
    "json.dumps = dumps\njson.JSONEncoder.swapped = 1\ndel json.JSONDecoder.raw_decode\n",
    "itself.py": "import sys\nclass Itself:\n  here = 1\nsys.modules[__name__] = Itself()\n",
}
SHARED = ["big.core", "big.lazy", "swaps.names", "other.beside", "late.two", "itself"]
PROGRAM = """
import atexit, importlib, json, logging, os, sys, warnings
way, lines = sys.argv[1:]
if way == "shared":
    from ft_launcher.node.zygote import fork_server
    from ft_launcher.node.zygote.first_import import imports
    fork_server.preload({shared!r})
    imports.undo()
    before = set(sys.modules)
    imports.watch()

def state():
    mine = {{"big", "other", "late", "itself", "swaps"}}
    loaded = [name for name in sys.modules if name.partition(".")[0] in mine]
    loggers = {{name: [found.level, len(found.handlers), found.parent.name]
               for name, found in logging.root.manager.loggerDict.items() if isinstance(found, logging.Logger)}}
    return {{
        "modules": loaded,
        "attributes": {{name: sorted(dir(sys.modules[name])) for name in loaded}},
        "loggers": loggers,
        "filters": [list(map(str, rule)) for rule in warnings.filters],
        "swapped": [json.dumps.__module__, "swapped" in vars(json.JSONEncoder), "raw_decode" in vars(json.JSONDecoder)],
        "handlers": len(logging._handlerList),
        "environ": {{name: value for name, value in os.environ.items() if name.startswith("BIG")}},
    }}

found = [state()]
count = atexit._ncallbacks()
names = {{}}
for line in lines.split(";"):
    try:
        exec(line, names)
    except Exception as error:
        found.append([type(error).__name__, str(error)])
    found.append(state())
    found.append(atexit._ncallbacks() - count)
print(json.dumps(found), flush=True)
"""
LINES = [
    "import big",
    "import big; big.core",
    "import big.core",
    "from big import core; core.names.one; core.log.warning('x')",
    "import big.leaf; import big; big.leaf",
    "from big.names import one",
    "from other import deep; deep(); import other.beside; import other; other.deep()",
    "import other.deep",
    "import late; late.two.Two; late.one",
    "import itself; itself.here",
    "import swaps.names; import big.core",
    "import json; json.loads('[1]'); from swaps import names",
    "import big.lazy; import big.core",
    "import os; os.environ.__setitem__('BIG_CACHE', 'mine'); import big.core",
    "import sys; sys.modules.get('big.made'); import big.made; import big.names.one; import big.made",
    "import importlib.util; importlib.util.find_spec('big.core').origin[:0]; import big.core",
    "import importlib; importlib.import_module('big.core'); importlib.reload(sys.modules['big.leaf']); import sys;"
    "importlib.reload(sys.modules['big.leaf'])",
    "import logging; logging.getLogger('big').setLevel(10); import big.core",
    "import pickle, late.two; pickle.loads(pickle.dumps(late.two.Two()))",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    for name, text in INSTALLED.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "program.py").write_text(PROGRAM.format(shared=SHARED))
    return folder


def told(place: Path, way: str, lines: str, **environ: str) -> tuple[Any, str]:
    """What the program saw, and what it printed last."""
    path = f"{place}:{ROOT}:{ROOT / 'client'}"
    clean = clean_environment("BIG", PYTHONPATH=path, **environ)
    done = run([sys.executable, place / "program.py", way, lines], folder=place, environ=clean, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n")
    return json.loads(first), rest


@pytest.mark.parametrize("lines", LINES)
def test_a_script_cannot_tell_that_modules_were_imported_before(place: Path, lines: str) -> None:
    plain, shared = (told(place, way, lines) for way in ("plain", "shared"))
    assert shared == plain
