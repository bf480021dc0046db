"""A /dev/shm that a program has for itself: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.program import run


def with_own_shm(mib: int = 64) -> list[str]:
    """Returns the words before a command that is to run with a /dev/shm of `mib` MiB."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"', "-"]


def start_with_own_shm(words: list[str], mib: int = 64, **more: Any) -> subprocess.Popen[bytes]:
    """Starts a program with a /dev/shm of `mib` MiB. `more`: for `subprocess.Popen`."""
    return subprocess.Popen([*with_own_shm(mib), *words], **more)


def why_not() -> str:
    """Returns why no program can have a /dev/shm of its own; empty: one can."""
    if run([*with_own_shm(), "true"]).returncode:
        return "this user may not mount a file system"
    return ""
