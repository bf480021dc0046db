"""A rank under the launcher that dies around `init_process_group`, or goes on without the one that did."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.client.inprocess import first_rank
from tests.faults.worker import write

FAULT = "FIRST_RANK_FAULT"
"""The variable with the arguments of `first_rank.main`."""


def main() -> None:
    """One rank."""
    folder, member = Path(sys.argv[-1]), os.environ["RANK"]
    result = first_rank.main(lambda note: None, **json.loads(os.environ[FAULT]))
    write(folder / "results" / member, json.dumps(result))


if __name__ == "__main__":
    main()
