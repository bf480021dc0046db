"""The rendezvous of a job of one node: no other node can join, so a cycle forms at once.

Made by torch's launcher through its registry. torch's own handler sleeps up to 0.3 s at its first round and a second in
later ones. Registered with torch's registry, so that everything else treats it like any other backend; endpoint, run id
and environment are the same for the ranks.
"""

from __future__ import annotations

from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry

BACKEND = "ft-one-node"


class OneNodeRendezvous(RendezvousHandler):  # type: ignore[misc]
    """A rendezvous handler for one node.

    Args:
        run_id: the job's id.
        host: what the ranks see as MASTER_ADDR.
        shares: whether the ranks use the launcher's store.
    """

    def __init__(self, run_id: str, host: str, shares: bool = True) -> None:
        self._run_id = run_id
        self._shares = shares
        self._host = host
        self._round = 0
        self._closed = False
        # In memory of this process: no port, and no server that another job could reach.
        self._store: Store = HashStore()

    def get_backend(self) -> str:
        """The backend's name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the launcher hosts the ranks' store."""
        return self._shares

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of 1, at once."""
        # torch's agent writes the same keys in each round.
        store = PrefixStore(f"round_{self._round}", self._store)
        self._round += 1
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._host, 0))

    def is_closed(self) -> bool:
        """Whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Marks the rendezvous as closed."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Returns 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Returns True; there is nothing to close."""
        return True


def _create(parameters: RendezvousParameters) -> OneNodeRendezvous:
    return OneNodeRendezvous(parameters.run_id, parameters.config["ft_host"], parameters.config["ft_shares"])


def register() -> None:
    """Makes the backend known to torch; a second call changes nothing."""
    rendezvous_handler_registry.register(BACKEND, _create)
