"""Skips every test here where torch can use no GPU, with the reason; starts jobs as the fault tests do."""

from __future__ import annotations

import pytest
import torch

from tests.faults.conftest import start_job  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def gpus() -> int:
    """How many GPUs torch sees; counting them makes no CUDA context."""
    if not torch.cuda.is_available():
        pytest.skip(f"needs a GPU: torch {torch.__version__} can use none here")
    return int(torch.cuda.device_count())
