"""What torch's C++ code may print: nothing in the launcher, as ever in its ranks and in other programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.program import run

SHOW = """
import ctypes, os, torch
library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
print("level", ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value)
"""
AGENT = "import torch; from ft_launcher.record.console import console; console.quiet_torch()"


def shown(*words: str, **environment: str) -> str:
    found = run([sys.executable, *words], environ=os.environ | environment, limit_s=120, check=True)
    return next(line for line in found.stdout.splitlines() if line.startswith("level"))


@pytest.mark.every_torch
def test_only_the_launcher_is_quiet(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    assert shown("-c", f"{AGENT}\n{SHOW}") == "level 3"
    assert shown("-c", f"{AGENT}\n{SHOW}", TORCH_CPP_LOG_LEVEL="INFO") == "level 0"
    usual = shown(str(script))
    for warm_start in ("on", "off"):
        assert shown("-m", "ft_launcher", f"--ft-warm-start={warm_start}", str(script)) == usual != "level 3"
