"""A rank under the launcher that runs a main program of the wrapper's own tests; says what came of it in a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.client.inprocess import mains
from tests.client.inprocess.job import seconds
from tests.faults.worker import write

FAULT = "IN_PROCESS_FAULT"
"""The variable with what goes wrong: `{"fault": ..., "on": [...]}` as `mains.main` takes it."""


def main() -> None:
    """One rank."""
    folder, member = Path(sys.argv[-1]), os.environ["RANK"]
    given: dict[str, Any] = json.loads(os.environ[FAULT])
    options = {name: seconds(value) for name, value in given.pop("seconds", {}).items()} | given.pop("options", {})
    result = mains.main(lambda note: None, **{**given, "on": tuple(given["on"])}, options=options)
    write(folder / "results" / member, json.dumps(result))


if __name__ == "__main__":
    main()
