"""Starts ranks that no launcher watches, in the environment that torch reads: `fork_ranks.py RANKS SCRIPT ARGUMENTS...`

The ranks are forks of this process, which has torch and the client's package loaded, so that many of them start quickly
and alike. It must not know what they do.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

import torch.distributed  # noqa: F401  the ranks have it loaded
from ports import free_port

PORTS = 3
"""The next two are free as well: a trainer may have its own store there."""


def main() -> int:
    """0 when every rank ended well."""
    ranks, (script, *arguments) = int(sys.argv[1]), sys.argv[2:]
    importlib.import_module(os.environ["BENCH_CLIENT"])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(PORTS))}
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
            sys.argv[:] = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return 0
    ends = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks)]
    return int(any(ends))


if __name__ == "__main__":
    sys.exit(main())
