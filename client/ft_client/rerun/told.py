"""What the launcher is told of a result in doubt, and what it tells the ranks that it has moved for one.

Without a launcher nobody is told. Never raises.
"""

from __future__ import annotations

import json
import logging
import os
import time

from ft_client import process
from ft_client.rerun import judgement
from ft_client.rerun.failure import Failure
from ft_client.rerun.place import Place
from rank_monitor.contract import env
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.json_record import from_json
from rank_monitor.contract.messages import ResultInDoubt

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0
_MOST_LETTERS = 200
_FINDINGS = {
    judgement.REPRODUCED: "reproducible",
    judgement.SAME_DEVICE: "same_device",
    judgement.PERSISTENT: "persistent_error",
}


def tell(status: str, failure: Failure) -> None:
    """Posts a finding for whose sake the ranks exit; of another one the launcher need not hear.

    Args:
        status: of `judgement`.
    """
    link, finding = process.current(), _FINDINGS.get(status)
    if link is None or finding is None:
        return
    node, device = (text[:_MOST_LETTERS] for text in (failure.computed_at.node, failure.computed_at.device))
    message = ResultInDoubt(finding, failure.rank, failure.iteration, node, device)
    link.post(message, time.monotonic_ns(), _PATIENCE_S)


def ran_before() -> tuple[int, Place] | None:
    """The rank in doubt, and where it computed its result in the cycle before; None: the launcher moved for none."""
    text = os.environ.get(env.RESULT_IN_DOUBT)
    if not text:
        return None
    try:
        doubt = from_json(ResultInDoubt, json.loads(text))
    except (ValueError, ProtocolError) as error:
        logger.warning("%s cannot be read: %s", env.RESULT_IN_DOUBT, error)
        return None
    return doubt.rank, Place(doubt.node, doubt.device)
