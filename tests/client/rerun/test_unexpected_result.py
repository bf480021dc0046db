"""What makes two devices the same."""

from __future__ import annotations

import pytest

from ft_client.rerun.unexpected_result import Device


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        (Device("a", "cpu"), Device("a", "cpu"), True),
        (Device("a", "cpu"), Device("b", "cpu"), False),
        (Device("a", "cuda:0"), Device("b", "cuda:0"), False),
        (Device("a", "cuda:1f-2e"), Device("a", "cuda:1f-2f"), False),
        (Device("a", "cuda:1f-2e"), Device("a-renamed", "cuda:1f-2e"), True),
    ],
)
def test_one_device(here: Device, there: Device, same: bool) -> None:
    assert here.is_same(there) is there.is_same(here) is same
