"""Ends the process groups of a test's program."""

from __future__ import annotations

from torch import distributed


def end_groups() -> None:
    """As `destroy_process_group()`, which can hang with torch 2.6 and gloo.

    There the destructor of a group waits for gloo's threads with the GIL held, and one of them may wait for the GIL, to
    free a tensor that nobody else holds. The destructor of a backend releases the GIL, so backends go last.
    """
    groups = list(distributed.distributed_c10d._world.pg_names)
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    groups.clear()
    distributed.destroy_process_group()
    backends.clear()
