"""The coordinator at work on a real TCPStore: what it reads before it writes, and what it removes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.distributed import TCPStore

from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import encode
from ft_launcher.job.link.attempt import NodeSettings, become_coordinator
from ft_launcher.job.link.coordinator_service import TERM, CoordinatorService, reply_key
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.errors import StoreLost
from tests.ft_launcher.job.nodes_of_a_test import judge, node
from tests.ft_launcher.job.store.test_job_store import PATIENT_S, keys_of, opened, server
from tests.patience import until

__all__ = ["server"]

ALONE = NodeSettings(Rules(Size(1, 2), last_call_s=0.2), judge, beat_s=0.05, timeout_s=PATIENT_S)
"""One node waits for a second one, and then forms a cycle without it: at a deadline of the coordinator."""


def coordinator(store: JobStore, settings: NodeSettings) -> CoordinatorService:
    made = become_coordinator("a", settings, store, 0)
    assert made is not None
    return made


def test_it_writes_nothing_at_a_deadline_once_another_one_took_over(server: TCPStore) -> None:
    """Also where the next reading of the beats, which reads the term, too, is far away."""

    class OvertakenStore(JobStore):
        """The other coordinator begins when the message has been read."""

        def read_inbox(self, taken: int, limit_s: float, more: Sequence[str] = ()) -> tuple[list[bytes], list[bytes]]:
            found = super().read_inbox(taken, limit_s, more)
            if found[0]:
                self.publish({TERM: "99"})
            return found

    store = OvertakenStore(*opened(f"127.0.0.1:{server.port}"))
    service = coordinator(store, replace(ALONE, beat_s=PATIENT_S))
    try:
        until(service.has_read, "the first reading of the beats")
        request = node("a")
        sender = store.another()
        sender.post(encode(request))
        until(lambda: not service.at_work, "it to find the other one")
        assert service.why_ended == "another coordinator took over"
        assert sender.receive(reply_key("a", request.seq), limit_s=0) is None
    finally:
        service.close()


def test_its_end_waits_for_the_thread_that_wakes_the_inbox(server: TCPStore) -> None:
    """A thread that is in torch's code when Python ends would abort the process."""

    class SlowStore(JobStore):
        """The thread is still there for a moment after its message is written."""

        def post(self, text: str) -> None:
            super().post(text)
            time.sleep(0.2)

    service = coordinator(SlowStore(*opened(f"127.0.0.1:{server.port}")), ALONE)
    until(service.has_read, "the first reading of the beats")
    service.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ft_wake"]


def test_messages_that_could_not_be_removed_are_removed_later(server: TCPStore) -> None:
    refused: list[int] = []

    class RefusingStore(JobStore):
        """Refuses the first removal."""

        def remove_messages(self, numbers: Iterable[int]) -> None:
            asked = list(numbers)
            if asked and not refused:
                refused.extend(asked)
                raise StoreLost("it is being restarted")
            super().remove_messages(asked)

    store = RefusingStore(*opened(f"127.0.0.1:{server.port}"))
    service = coordinator(store, ALONE)
    try:
        sender = store.another()
        sender.post(encode(node("a")))
        until(lambda: refused, "the first removal")
        until(lambda: not keys_of(sender).check([f"inbox/{refused[0]}"]), "the second one")
        assert service.at_work
    finally:
        service.close()
