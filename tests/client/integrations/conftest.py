"""Jobs under the real launcher, as the tests of faults start them, and a node's folder for one rank."""

from __future__ import annotations

from tests.client.memory.conftest import tell
from tests.faults.conftest import start_job

__all__ = ["start_job", "tell"]
