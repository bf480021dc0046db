"""Jobs as the fault tests start them, for trainings of other tools."""

from __future__ import annotations

from tests.faults.conftest import start_job as start_job
