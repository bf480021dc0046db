"""The environment of an iteration, for `init_process_group()` by `env://` to make a new group each time.

A store server that held one group cannot hold the next, so the iteration's first rank hosts a fresh one, as plain torch
does, at a port agreed for the iteration.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping

from ft_client.inprocess.state import State, environment

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
_FREE_AFTER = 2
_TRIES = 100


class IterationEnvironment:
    """The process's environment while iterations run. LOCAL_RANK stays: it says which device is this rank's."""

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _NAMES}

    def set(self, state: State, master: str) -> None:
        """For the iteration of `state`; `master` is what `offer` returned on its first rank."""
        found: Mapping[str, object] = json.loads(master)
        host, port = found["host"], found["port"]
        os.environ.update(environment(state))
        os.environ.update(MASTER_ADDR=str(host), MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")

    def restore(self) -> None:
        """What was before the first iteration."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def offer(towards: tuple[str, int] | None) -> str:
    """An address of this host at which the others reach it, and a port that is free, as are the next two.

    Args:
        towards: where the store is that all ranks reach; None: all ranks are on this host.

    Raises:
        OSError: no such port.
    """
    host = "127.0.0.1" if towards is None else own_address(towards)
    for _ in range(_TRIES):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as first:
            first.bind((host, 0))
            port = first.getsockname()[1]
            if all(_is_free(host, port + offset) for offset in range(1, _FREE_AFTER + 1)):
                return json.dumps({"host": host, "port": port})
    raise OSError(f"no free port at {host}")


def own_address(towards: tuple[str, int]) -> str:
    """The address that this host has on its way to another; nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _is_free(host: str, port: int) -> bool:
    if port > 65535:
        return False
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
