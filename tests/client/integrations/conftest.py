"""Jobs under the real launcher, as the tests of faults start them."""

from __future__ import annotations

from tests.faults.conftest import start_job

__all__ = ["start_job"]
