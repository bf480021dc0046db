"""What the launcher tells ranks that moved, and what makes two places the same."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ft_client.rerun import ran_before
from ft_client.rerun.place import Place
from rank_monitor.contract.messages import ResultInDoubt

VARIABLE = "FT_RESULT_IN_DOUBT"


def test_where_the_rank_in_doubt_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ran_before() is None
    monkeypatch.setenv(VARIABLE, json.dumps(asdict(ResultInDoubt("reproducible", 3, 7, "a", "cpu"))))
    assert ran_before() == (3, Place("a", "cpu"))
    for text in ("{", "[]", '{"rank": "3"}'):
        monkeypatch.setenv(VARIABLE, text)
        assert ran_before() is None, "a broken word stops no training"


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        (Place("a", "cpu"), Place("a", "cpu"), True),
        (Place("a", "cpu"), Place("b", "cpu"), False),
        (Place("a", "cuda:0"), Place("b", "cuda:0"), False),
        (Place("a", "cuda:1f-2e"), Place("a", "cuda:1f-2f"), False),
        (Place("a", "cuda:1f-2e"), Place("a-renamed", "cuda:1f-2e"), True),
    ],
)
def test_one_device(here: Place, there: Place, same: bool) -> None:
    assert here.is_same(there) is there.is_same(here) is same
