"""A store that is on no training node: serves a TCPStore at a port until its input ends. A program of its own."""

from __future__ import annotations

import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    server = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    print(server.port, flush=True)
    sys.stdin.read()
