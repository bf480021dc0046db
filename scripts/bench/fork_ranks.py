"""Starts ranks that no launcher watches, in the environment that torch reads: `fork_ranks.py RANKS SCRIPT ARGUMENTS...`

The ranks are forks of this process, which has torch and the client's package loaded, so that many of them start quickly
and alike. It must not know what they do.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys

import torch.distributed  # noqa: F401  the ranks have it loaded


def free_port() -> int:
    """A port that nobody uses now, and neither the next two: a trainer may have its own store there."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except (OSError, OverflowError):
                continue
            return port


def main() -> int:
    """0 when every rank ended well."""
    ranks, (script, *arguments) = int(sys.argv[1]), sys.argv[2:]
    importlib.import_module(os.environ["BENCH_CLIENT"])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
