"""The texts with which torch, gloo and NCCL report that another rank is gone: such an error is a consequence. Pure.

`decide/attribution/known_errors.py` calls it, and the wrapper in a rank. Any rank can have written the text that is
searched, so it is cut first, and every repetition in the pattern is bounded.
"""

from __future__ import annotations

import re

from rank_monitor.contract.errors import both_ends

MAX_SEARCHED = 8192
"""Characters of one exception's text that are searched. What an error is stands at its beginning, or at its end where
the text is that of another process's error; between them are values, C++ frames, and frames of that process."""

_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|closed by peer|reset by peer"
    r"|remote (process|side|peer)|ncclRemoteError|NCCL.{0,200}abort|recvValue failed|sendBytes failed|recvBytes failed"
    r"|socket has failed to connect to|while trying to connect to|connectFullMesh failed|Got completion from peer",
    re.IGNORECASE,
)


def is_lost_peer(text: str) -> bool:
    """Whether an exception's text reports a lost peer. Takes time linear in `MAX_SEARCHED` at most."""
    return _LOST.search(both_ends(text, MAX_SEARCHED)) is not None
