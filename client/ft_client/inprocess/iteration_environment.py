"""The environment of an iteration, for `init_process_group()` by `env://` to make a new group each time.

A store server that held one group cannot hold the next, so the iteration's first rank hosts a fresh one for it. It does
so before the function runs: a rank that waits for a server that never comes could not be interrupted.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket

from ft_client.inprocess.state import State, environment
from ft_client.inprocess.store_host import listen, serve

_FREE_AFTER = 2
_TRIES = 100

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")


class IterationEnvironment:
    """The process's environment while iterations run. LOCAL_RANK stays: it says which device is this rank's."""

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _NAMES}

    def set(self, state: State, note: str) -> None:
        """For the iteration of `state`; `note` is that of the `Master` of its first rank."""
        os.environ.update(environment(state) | json.loads(note))

    def restore(self) -> None:
        """What was before the first iteration."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Master:
    """A store server for one iteration, as long as this object lives; `note`: the variables by which others find it.

    Args:
        towards: where the store of the coordination is, which all ranks reach; None: all ranks are on this host.

    Raises:
        OSError: there is no port that is free, as the next two are, which are the trainer's.
    """

    def __init__(self, towards: tuple[str, int] | None) -> None:
        host = "127.0.0.1" if towards is None else own_address(towards)
        self._server = serve(_listen(host), host)
        self.note = json.dumps(
            {"MASTER_ADDR": host, "MASTER_PORT": str(self._server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        )


def _listen(host: str) -> socket.socket:
    for _ in range(_TRIES):
        listener = listen(host, 0)
        port = listener.getsockname()[1]
        if all(_is_free(host, port + offset) for offset in range(1, _FREE_AFTER + 1)):
            return listener
        listener.close()
    raise OSError(f"no free port at {host}")


def _is_free(host: str, port: int) -> bool:
    try:
        listen(host, port).close()
    except (OSError, OverflowError):
        return False
    return True


def own_address(towards: tuple[str, int]) -> str:
    """The address that this host has on its way to another; nothing is sent. On that host itself its name may mean
    loopback, but not so elsewhere: there it is the name that was given."""
    family, kind, _, _, where = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        own = str(probe.getsockname()[0])
    return towards[0] if ipaddress.ip_address(own).is_loopback else own
