"""How long tests wait for what must happen. A deadline ends a test that hangs; it measures nothing.

`FT_TEST_PATIENCE` multiplies every deadline: 1 on a calm machine, 3 in CI, where others may use the same cores.
What a test gives the product to keep (a section's limit, a node timeout) stays as it is.
"""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("FT_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """The deadline for what takes so many seconds at most on a calm machine."""
    return seconds * PATIENCE
