"""A store that is on no training node: a process of its own that serves a TCPStore, on this machine or inside a node.

It is forked as the ranks of the wrapper's tests are, so that a store costs no import of torch. Knows no launcher.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

from rank_monitor.contract.processes import resolver
from tests.client.inprocess.job import PRELOAD
from tests.faults.job import kill
from tests.patience import patient

_LIMIT_S = 60.0


class StoreHost:
    """A running store at a port. `node`: a process in whose namespaces it is; None: in those of the test."""

    def __init__(self, port: int, node: int | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, port, node), daemon=True)
        self._process.start()
        theirs.close()
        with ours:
            assert ours.poll(patient(_LIMIT_S)) and ours.recv() == port

    def kill(self) -> None:
        """Ends it; harmless when it has ended."""
        if self._process.is_alive() and self._process.pid is not None:
            kill(self._process.pid)
        self._process.join()


def _serve(ready: Connection, port: int, node: int | None) -> None:
    for space in ("net", "uts", "mnt") if node else ():
        descriptor = os.open(f"/proc/{node}/ns/{space}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(descriptor, 0) == 0, f"cannot enter {space} of {node}"
        os.close(descriptor)
    from torch.distributed import TCPStore

    resolver.bound_process()  # as in a launcher that hosts: the server looks up who connects, and is deaf meanwhile
    server = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    ready.send(server.port)
    ready.close()
    signal.pause()
