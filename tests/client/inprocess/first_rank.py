"""What ranks run of which one dies around the making of its process group."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from torch import distributed

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess.job import seconds
from tests.client.inprocess.mains import Note, me, sum_of_ranks
from tests.groups import end_groups

PLACES = ("before", "in", "some time in")
"""Before `init_process_group`; in it, with its connection to the store and nothing said there; in it, some time."""
TIMEOUTS = {"last_call_wait": 0.0, "soft_timeout": 40.0, "hard_timeout": 60.0, "barrier_timeout": 100.0}
"""Far longer than what is tested takes: nobody may have to wait for them."""


def main(note: Note, victim: int, place: str, iteration: int, delay_s: float = 0.001) -> Any:
    """Makes a group in each round; one rank (at entry) dies in a round.

    Args:
        round: 0; or 1, after an exception of the last rank in round 0.
        delay_s: from the call of `init_process_group` to the death, for the place `some time in`.

    Returns:
        What the collective gave, and the round that ended well.
    """
    entry, size = me()

    def function(call: CallWrapper) -> tuple[int, int]:
        if call.iteration == iteration and entry == victim:
            die(place, delay_s)
        if call.iteration < iteration and entry == size - 1:
            raise ValueError("the function failed")
        total = sum_of_ranks()
        distributed.barrier()
        end_groups()
        return total, call.iteration

    return Wrapper(**{name: seconds(value) for name, value in TIMEOUTS.items()})(function)()


def die(place: str, delay_s: float) -> None:
    """Ends this process around `init_process_group`."""
    if place == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if place == "in":
        next(distributed.rendezvous("env://"))
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_kill_after, args=(delay_s,), daemon=True).start()
    sum_of_ranks()
    time.sleep(60)


def _kill_after(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)
