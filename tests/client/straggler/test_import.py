"""Importing the package costs nothing; every public name is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ft_client import straggler


def test_nothing_is_loaded_until_it_is_needed() -> None:
    code = "import sys, ft_client.straggler as s; assert 'Detector' in dir(s)\n"
    code += "assert not [name for name in sys.modules if name.startswith(('ft_client.straggler.', 'torch', 'numpy'))]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names() -> None:
    assert all(getattr(straggler, name).__name__ == name for name in straggler.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        straggler.nothing  # noqa: B018
