"""CUDA_VISIBLE_DEVICES as CUDA reads it."""

from __future__ import annotations

import pytest

from ft_launcher.health.visible_gpus import visible

UUIDS = ["GPU-aa11", "GPU-ab22", None, "GPU-cc33"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ([0, 1, 2, 3], "")),
        ("", ([], "")),
        ("-1", ([], "")),
        ("0", ([0], "")),
        ("3,1", ([3, 1], "")),
        (" 2 , 0", ([2, 0], "")),
        ("1,-1,2", ([1], "")),
        ("1,9,2", ([1], "9")),
        ("GPU-ab22", ([1], "")),
        ("GPU-c,0", ([3, 0], "")),
        ("GPU-a", ([], "GPU-a")),
        ("MIG-1234", ([], "MIG-1234")),
    ],
)
def test_visible(asked: str | None, found: tuple[list[int], str]) -> None:
    assert visible(asked, UUIDS) == found
