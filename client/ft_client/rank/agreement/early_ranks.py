"""The ranks of the job before they have a process group: what they say to each other goes through the launcher's store.

For a look for state in memory that a program makes before its framework has called `init_process_group`. The store is
new in each cycle, so no key of an earlier cycle can be read. A restart in process may come while some ranks have begun
a call and others have not, so each of its rounds has keys of its own.
"""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

from ft_client.rank.agreement.roll_call import RollCall, limit_s
from rank_monitor.contract import env
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.rounds.barrier import Store

_TIMEOUT_S = 1800.0
"""For how long ranks that come late are waited for, as in torch's group with gloo."""


class EarlyRanks:
    """This rank among the ranks of the job, by the variables of the launcher.

    Args:
        call: what all ranks must call, for the error where some do not.
        store: None: that of the launcher, which is connected to when it is needed.
    """

    def __init__(self, call: str, store: Store | None = None) -> None:
        self._call = call
        self._store = store

    def rank(self) -> int:
        """Returns the number of this rank in the job."""
        return int(os.environ.get("RANK", "0"))

    def size(self) -> int:
        """Returns how many ranks the job has."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    def gather_json(self, value: Any) -> list[Any]:
        """Returns what each rank gives, by rank, on every rank. All ranks call it as often; blocks until they have.

        `value`: what JSON can hold. Tuples come back as lists.

        Raises:
            NotAllCame: some ranks do not call it. The error names them.
            RuntimeError: the store does not answer.
        """
        text = json.dumps(value)
        if self.size() == 1:
            return [json.loads(text)]
        store = self._store
        if store is None:
            store = _store_of_launcher(self._call, self.size())
        number = store.add(f"number/{self.rank()}", 1)
        store.set(f"{number}/{self.rank()}", text)
        RollCall(self._call, store, self.rank(), self.size()).await_all(limit_s(_TIMEOUT_S))
        keys = [f"{number}/{rank}" for rank in range(self.size())]
        found = [json.loads(said) for said in store.multi_get(keys)]
        if store.add(f"{number}/read", 1) == self.size():
            for key in (*keys, f"{number}/read"):
                store.delete_key(key)
        return found


def _store_of_launcher(call: str, size: int) -> Store:
    """Returns the keys of a call in the launcher's store for this cycle."""
    from torch.distributed import PrefixStore, TCPStore

    host, _, port = os.environ.get(env.CYCLE_STORE, "").rpartition(":")
    if not host:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    with resolver.towards(host, int(port)) as found, making_store():
        store = TCPStore(found, int(port), size, is_master=False, timeout=timeout, wait_for_workers=False)
    with making_store():
        prefixed: Store = PrefixStore(prefix_of(call, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), store)
    return prefixed


def prefix_of(call: str, address: str, port: str) -> str:
    """Returns with what the keys of a call begin.

    Args:
        call: what the program calls.
        address, port: where ranks make their process group. Each round of a restart in process has another port than
            the round before.
    """
    return f"ft_early/{call}/{address}:{port}"
