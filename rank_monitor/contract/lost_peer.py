"""The texts with which torch, gloo and NCCL report that another rank is gone: such an error is a consequence. Pure.

`decide/attribution/known_errors.py` calls it for the launcher's search for the first failure, and the in-process
wrapper calls it in a rank. Any rank can have written the text that is searched, so the text is cut first, and every
repetition in the pattern is bounded.
"""

from __future__ import annotations

import re

from rank_monitor.contract.errors import both_ends

MAX_SEARCHED = 8192
"""Characters of one exception's text that are searched. An error is named at the beginning of its text, or at the end
where the text wraps the error of another process. Between the two are values, C++ frames, and that process's frames."""

_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|closed by peer|reset by peer"
    r"|remote (process|side|peer)|ncclRemoteError|NCCL.{0,200}abort|recvValue failed|sendBytes failed|recvBytes failed"
    r"|socket has failed to connect to|while trying to connect to|connectFullMesh failed|Got completion from peer",
    re.IGNORECASE,
)


def is_lost_peer(text: str) -> bool:
    """Whether an exception's text reports a lost peer. Takes at most time linear in `MAX_SEARCHED`.

    Example: `Connection closed by peer [10.0.0.2]:31337`, which gloo raises in every rank that waited for a dead one.
    """
    return _LOST.search(both_ends(text, MAX_SEARCHED)) is not None
