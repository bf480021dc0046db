"""Words by which torch, gloo and NCCL say that another rank is gone: an error with them is a consequence. Pure.

Whoever wrote the text may have been any rank, so it is cut before it is searched, and every repetition is bounded.
"""

from __future__ import annotations

import re

MOST_SEARCHED = 8192
"""Characters of one exception's text that are searched. What an error is stands at its beginning; what follows are
values and C++ frames."""

_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|closed by peer|reset by peer"
    r"|remote (process|side|peer)|ncclRemoteError|NCCL.{0,200}abort|recvValue failed|sendBytes failed|recvBytes failed"
    r"|socket has failed to connect to|while trying to connect to|connectFullMesh failed|Got completion from peer",
    re.IGNORECASE,
)


def is_lost_peer(words: str) -> bool:
    """Whether an exception's text says so."""
    return _LOST.search(words[:MOST_SEARCHED]) is not None
