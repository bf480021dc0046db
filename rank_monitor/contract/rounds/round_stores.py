"""Serves the store of each round, in which the wrapped function makes its process groups.

A server that held one group cannot hold the next, so each round has a fresh server. The host is the agent that hosts
the ranks' store, or the standalone agent of rank 0. A rank hosts only where neither can: the other ranks would wait
without end for a host that died around `init_process_group`.

**Sequence.** The host runs `serve_rounds` in a thread, from the beginning of a call to its end. For each round it makes
a server and writes its *store address* (`Round.offer`), one round ahead, so that no restart waits for it. The last
rank that arrives at the start of the round passes the address on to all (`Round.arrive`); each rank puts it into its
environment (`variables_of`), where torch finds it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, MutableMapping

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.rounds.barrier import EVER, Store
from rank_monitor.contract.rounds.round import DONE, FAULT, Round, current
from rank_monitor.contract.wire.foreign import parse_json

_SETTLED = datetime.timedelta(seconds=0.1)
"""How long after the start of a round the server of the next one is made: that takes 1 ms of CPU time, which the ranks
need to begin."""
_PROBLEM = "problem"


def serve_rounds(
    store: Store, serve: Callable[[], tuple[object, int]], host: str, servers: MutableMapping[int, object]
) -> None:
    """Serves until the call is done. Blocks; to be called in a thread, with a store connection of its own.

    A server that cannot be made is written into the address as a problem: the ranks of that round raise it.

    Args:
        store: the keys of the call.
        serve: makes a server; returns the server and its port. The server serves as long as the object lives.
        host: the address under which all ranks reach the server.
        servers: where the servers are stored, by their round. Servers that may be in use are left there at the end.

    Raises:
        RuntimeError: what the store raises when it is lost.
    """

    def offer(number: int) -> None:
        try:
            servers[number], port = serve()
            store_address = store_address_of(host, port)
        except (OSError, RuntimeError) as error:
            store_address = json.dumps({_PROBLEM: f"{type(error).__name__}: {error}"})
        Round(store, number).offer(store_address)

    number = current(store)
    started = Round(store, number).started
    # After a fault too: the last rank that arrived before the fault may wait for an address, and would never reach the
    # end of the round.
    if not store.check([started]) or store.get(started) == FAULT.encode():
        offer(number)
    while True:
        this_round = Round(store, number)
        store.wait([this_round.started], EVER)
        with contextlib.suppress(RuntimeError):  # time is up; if the store is lost instead, the next call raises again
            store.wait([this_round.outcome], _SETTLED)
        offer(number + 1)
        servers.pop(number - 1, None)
        store.wait([this_round.outcome], EVER)
        if store.get(this_round.outcome) == DONE.encode():
            return
        number += 1


def store_address_of(host: str, port: int) -> str:
    """Returns the store address of a server: the environment variables by which torch finds the server, as JSON."""
    return json.dumps({"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"})


_VARIABLES = set(json.loads(store_address_of("", 0)))


def variables_of(store_address: str) -> dict[str, str]:
    """Returns the variables of a store address, which a rank sets before it calls the function.

    Raises:
        RuntimeError: the host could make no server; the text says why.
        ProtocolError: the text is no store address, or would set other variables.
    """
    try:
        found = dict(parse_json(store_address))
    except (ValueError, TypeError) as problem:
        raise ProtocolError(f"the store address of a round: {problem}") from None
    if _PROBLEM in found:
        raise RuntimeError(f"the store of this round could not be served: {found[_PROBLEM]}")
    if set(found) != _VARIABLES or not all(isinstance(value, str) for value in found.values()):
        raise ProtocolError("the store address of a round names other variables")
    return found
