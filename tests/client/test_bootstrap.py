"""What a rank loads before its script, and when."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.program import output_of

RANK = """
import sys
from ft_client import bootstrap
bootstrap.load()
before = set(sys.modules)
bootstrap.Rank(bootstrap.main_of(["script.py"], ""), bootstrap.prepare())
print(sorted(name for name in set(sys.modules) - before if name.startswith(("ft_client", "rank_monitor"))))
"""


def test_a_fork_of_the_zygote_loads_nothing_more_of_ours(tmp_path: Path) -> None:
    """Each module that every fork would read again costs every restart."""
    assert output_of([sys.executable, "-c", RANK], tmp_path) == "[]\n"
