"""Which files changed, as git tells it: since the branch left main, on main itself since the last tag.

Files that are not committed yet count as well. Reads only; where git is missing or fails, nothing has changed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_MAIN = ("origin/main", "main")
_LIMIT_S = 20.0
"""For a folder on a file server that is slow: tests run without the answer."""


def changed_paths(root: Path) -> list[str]:
    """Returns the paths, from `root`, of files that were changed, added or removed."""
    base = _base(root)
    if not base:
        return []
    tracked = _git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", base)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*tracked.split("\0"), *new.split("\0")} - {""})


def _base(root: Path) -> str:
    """The commit that changes are counted from; HEAD on a main branch without a tag; empty without git."""
    head = _git(root, "rev-parse", "HEAD").strip()
    for main in _MAIN:
        left_at = _git(root, "merge-base", "HEAD", main).strip()
        if left_at and left_at != head:
            return left_at
    return _git(root, "describe", "--tags", "--abbrev=0").strip() or head


def _git(root: Path, *words: str) -> str:
    """What a command of git prints; empty when it fails. A hook's variables, of another repository, do not count."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=root,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    if done.returncode:
        return ""
    return done.stdout
