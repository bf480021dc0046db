"""No detection is left behind for the next test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ft_client.straggler import Detector


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    Detector.shutdown()
