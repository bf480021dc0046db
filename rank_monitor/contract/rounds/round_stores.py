"""Serves the store of each round, in which the function makes its process groups.

A server that held one group cannot hold the next, so each round has a fresh one. A rank hosts it only where neither
agent nor companion can: the others would wait without end for a rank that died around `init_process_group`. It is made
one round ahead, so that no restart waits for it. The host is the agent that hosts the ranks' store, or the
companion of rank 0.
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
"""Delay after the start of a round: making a server takes 1 ms of CPU time, which the ranks need to begin."""
_PROBLEM = "problem"


def serve_rounds(
    store: Store, serve: Callable[[], tuple[object, int]], host: str, servers: MutableMapping[int, object]
) -> None:
    """Serves until the call is done. Blocks; to be called in a thread, with a store connection of its own.

    Args:
        store: the keys of the call.
        serve: makes a server; returns it and its port. It serves as long as the object lives.
        host: the address under which all ranks reach it.
        servers: where the servers are kept, by their round. Those that may be in use are left at the end.

    Raises:
        RuntimeError: what the store raises when it is lost.
    """

    def offer(number: int) -> None:
        try:
            servers[number], port = serve()
            note = note_of(host, port)
        except (OSError, RuntimeError) as error:
            note = json.dumps({_PROBLEM: f"{type(error).__name__}: {error}"})
        Round(store, number).offer(note)

    number = current(store)
    started = Round(store, number).started
    # After a fault, too: the last rank that arrived before it may wait for a note, and would not come to the end.
    if not store.check([started]) or store.get(started) == FAULT.encode():
        offer(number)
    while True:
        this_round = Round(store, number)
        store.wait([this_round.started], EVER)
        with contextlib.suppress(RuntimeError):  # what a store raises when time is up; one that is lost raises again
            store.wait([this_round.outcome], _SETTLED)
        offer(number + 1)
        servers.pop(number - 1, None)
        store.wait([this_round.outcome], EVER)
        if store.get(this_round.outcome) == DONE.encode():
            return
        number += 1


def note_of(host: str, port: int) -> str:
    """The note about a server: the environment variables by which torch finds it, as JSON."""
    return json.dumps({"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"})


_VARIABLES = set(json.loads(note_of("", 0)))


def variables_of(note: str) -> dict[str, str]:
    """The variables of a note.

    Raises:
        RuntimeError: no server could be made; the text says why.
        ProtocolError: it is not a note.
    """
    try:
        found = dict(parse_json(note))
    except (ValueError, TypeError) as problem:
        raise ProtocolError(f"the note of a round: {problem}") from None
    if _PROBLEM in found:
        raise RuntimeError(f"the store of this round could not be served: {found[_PROBLEM]}")
    if set(found) != _VARIABLES or not all(isinstance(value, str) for value in found.values()):
        raise ProtocolError("the note of a round names other variables")
    return found
