"""Assigns other GPUs of this node to ranks when a result is suspect, by CUDA_VISIBLE_DEVICES. Pure.

`agent/single_node.py` calls it after a fault; among several nodes `nodes/formation.py` moves the ranks instead. With
more GPUs than ranks the suspect one is left out. Otherwise each rank gets the next one, so that the suspect rank
computes on another device while all are in use. A node whose GPUs have no known UUIDs has no other device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft_launcher.health.visible_devices import visible
from rank_monitor.contract.wire.messages import ResultInDoubt

VISIBLE = "CUDA_VISIBLE_DEVICES"
# A rank names its device as `cuda:UUID`; the driver's UUIDs begin with `GPU-`.
_TORCHS, _DRIVERS = "cuda:", "GPU-"


@dataclass(frozen=True)
class Relocation:
    """Why the ranks of a cycle run on other hardware than before (`result` None: they do not), and which GPUs they see.

    `visible` is a value of CUDA_VISIBLE_DEVICES; empty: the launcher's own.
    """

    result: ResultInDoubt | None = None
    visible: str = ""


def another_device(
    result: ResultInDoubt | None,
    ranks: int,
    environ: Mapping[str, str],
    uuids: Sequence[str | None],
    former: Relocation,
) -> Relocation | None:
    """Returns which GPUs `ranks` ranks are to see because of `result`; None: no doubt, or no other device here.

    Args:
        environ: the launcher's own environment.
        uuids: of every GPU of the node, as the driver spells them (`GPU-...`); None: not known.
        former: how they run now.
    """
    if result is None:
        return None
    indices, _ = visible(former.visible or environ.get(VISIBLE), uuids)
    named = (uuids[index] for index in indices)
    shown = [uuid for uuid in named if uuid is not None]
    suspect = _DRIVERS + result.device.removeprefix(_TORCHS).removeprefix(_DRIVERS)
    # With one GPU a rotation gives each rank the device that it had.
    if suspect not in shown or len(shown) < max(2, ranks):
        return None
    moved = [uuid for uuid in shown if uuid != suspect]
    if len(moved) < ranks:
        moved = shown[1:] + shown[:1]
    return Relocation(result, ",".join(moved))
