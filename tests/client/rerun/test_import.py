"""Importing the package costs nothing; every public name is there when it is asked for."""

from __future__ import annotations

import pytest

from ft_client import rerun
from tests.program import python


def test_nothing_is_loaded_until_it_is_needed() -> None:
    code = """
import sys
import ft_client.rerun as rerun
assert "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith("ft_client.rerun.")]
for name in rerun.__all__:
    getattr(rerun, name)
"""
    python(code)


def test_public_names() -> None:
    assert set(rerun.__all__) <= set(dir(rerun))
    assert (rerun.EXIT_CODE_RESUME_TO_DISAMBIGUATE, rerun.EXIT_CODE_FAILED_ON_RESULT_VALIDATION) == (16, 17)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rerun.nothing  # noqa: B018
