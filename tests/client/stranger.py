"""Another user of the machine, who holds an abstract name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.program import started

_HOLDS = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
end, other = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
end.bind("\\0" + sys.argv[1])
if sys.argv[2] != "never":
    end.listen(int(sys.argv[2]))
if sys.argv[2] == "0":
    other.connect(end.getsockname())
print("holds it", flush=True)
sys.stdin.read()
"""

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")


@contextmanager
def holding(name: str, listens: str) -> Iterator[None]:
    """While this lasts, another user has `name`. `listens`: the length of its queue; 0 is full at once; or `never`."""
    words = [sys.executable, "-S", "-c", _HOLDS, name, listens]
    with started(words) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "holds it\n"
        yield
