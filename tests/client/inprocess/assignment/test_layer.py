"""Layers that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from ft_client.inprocess.assignment.topology import Layer, LayerFlag


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"min_ranks": "8"}, TypeError, "min_ranks='8'"),
        ({"min_ranks": None}, TypeError, "min_ranks=None"),
        ({"max_ranks": 8.0}, TypeError, "max_ranks=8.0"),
        ({"max_ranks": True}, TypeError, "max_ranks=True"),
        ({"key_or_fn": [3]}, TypeError, r"key_or_fn=\[3\]"),
        ({"flag": "RESERVE"}, TypeError, "flag='RESERVE'"),
        ({"min_ranks": 8, "max_ranks": 4}, ValueError, "max_ranks=4 is below min_ranks=8"),
        ({"min_ranks": 0, "max_ranks": 0}, ValueError, "max_ranks=0"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Layer(**given)


def test_defaults_and_flags() -> None:
    layer = Layer()
    assert (layer.min_ranks, layer.max_ranks, layer.key_or_fn, layer.flag) == (1, None, "", None)
    both = Layer(flag=LayerFlag.RESERVE | LayerFlag.BACKFILL)
    assert both.has(LayerFlag.RESERVE) and both.has(LayerFlag.BACKFILL)
    assert not layer.has(LayerFlag.RESERVE) and not Layer(flag=LayerFlag.BACKFILL).has(LayerFlag.RESERVE)
