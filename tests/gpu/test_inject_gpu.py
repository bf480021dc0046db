"""Faults of the device, for real: an allocation that fails, and an error after which every call fails."""

from __future__ import annotations

import pytest

from tests.client.inject.test_inject_calls import ended

pytestmark = pytest.mark.gpu

USE = "import torch\nweight = torch.ones(4, device='cuda')\n"


def test_no_memory_on_the_device() -> None:
    """The device can be used afterwards."""
    code, out, err = ended(f"""{USE}
try:
    inject_fault("oom")
except torch.OutOfMemoryError:
    print(weight.sum().item())
""")
    assert (code, out) == (0, "4.0\n"), err


def test_a_device_error_stays() -> None:
    _, out, err = ended(f"""{USE}
for _ in range(2):
    try:
        inject_fault("device_error")
    except RuntimeError:
        print("failed")
""")
    assert out == "failed\nfailed\n", err
