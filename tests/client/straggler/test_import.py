"""Importing the package costs nothing; every public name is there when it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from ft_client import straggler
from tests.program import python


def test_nothing_is_loaded_until_it_is_needed() -> None:
    code = "import sys, ft_client.straggler as s; assert 'Detector' in dir(s)\n"
    code += "assert not [name for name in sys.modules if name.startswith(('ft_client.straggler.', 'torch', 'numpy'))]"
    python(code)


def test_public_names() -> None:
    names: Any = straggler.__all__
    assert all(getattr(straggler, name).__name__ == name for name in names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        straggler.nothing  # noqa: B018
