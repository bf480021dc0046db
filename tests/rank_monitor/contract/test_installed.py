"""When a package is there: it has a file."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from rank_monitor.contract.installed import file_of


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), None),
        (("peer/",), None),
        (("peer/inner/__pycache__/module.cpython-311.pyc",), None),
        (("peer/README.md",), None),
        (("peer/inner/module.py",), "peer/inner/module.py"),
        (("peer/inner/module.so",), "peer/inner/module.so"),
        (("peer/__init__.py", "peer/inner/module.py"), "peer/__init__.py"),
        (("peer.py",), "peer.py"),
    ],
)
def test_a_package_has_a_file(tmp_path: Path, files: tuple[str, ...], found: str | None) -> None:
    for name in files:
        path = tmp_path / name
        if name.endswith("/"):
            path.mkdir()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    expected = None
    if found is not None:
        expected = str(tmp_path / found)
    assert file_of(PathFinder.find_spec("peer", [str(tmp_path)])) == expected
