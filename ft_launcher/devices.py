"""Other devices of this node for ranks one of whose results is in doubt, by what CUDA is told to show them. Pure.

With more GPUs than ranks the one under suspicion is left out. Else each rank has the next one, so that the rank in
doubt computes on another device, while all are in use. A node whose GPUs cannot be told apart has no other device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft_launcher.health.visible_gpus import visible
from rank_monitor.contract.messages import ResultInDoubt

VISIBLE = "CUDA_VISIBLE_DEVICES"
_TORCHS, _DRIVERS = "cuda:", "GPU-"


@dataclass(frozen=True)
class Move:
    """Why the ranks of a cycle run on other hardware than before (None: they do not), and which GPUs they see.

    `visible` is empty where they see those that the launcher does.
    """

    doubt: ResultInDoubt | None = None
    visible: str = ""


def another_device(
    doubt: ResultInDoubt | None, ranks: int, environ: Mapping[str, str], uuids: Sequence[str | None], former: Move
) -> Move | None:
    """How `ranks` ranks are to run for the sake of `doubt`; None: there is no doubt, or no other device here.

    Args:
        environ: the launcher's own environment.
        uuids: of every GPU of the node, as the driver spells them; None: not known.
        former: how they run now.
    """
    if doubt is None:
        return None
    indices, _ = visible(former.visible or environ.get(VISIBLE), uuids)
    shown = [uuid for index in indices if (uuid := uuids[index]) is not None]
    suspect = _DRIVERS + doubt.device.removeprefix(_TORCHS).removeprefix(_DRIVERS)
    if suspect not in shown or len(shown) < max(2, ranks):
        return None
    others = [uuid for uuid in shown if uuid != suspect]
    return Move(doubt, ",".join(others if len(others) >= ranks else shown[1:] + shown[:1]))
