"""What the ranks show before the stop: whether they hang, and whether the cause may still come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.decide.attribution import BAD_LOSS, RankEvidence
from ft_launcher.decide.attribution.triage import Outlook, outlook
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import RankException

LOST = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
WAITED = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 milliseconds"


def ended(rank: int, code: int = 1, at: float = 1.0, **fields: Any) -> RankEvidence:
    return RankEvidence(rank, rank, 40 + rank, exit_code=code, died_at=at, **fields)


def raised(rank: int, message: str, kind: str = "RuntimeError", at: float = 1.0) -> RankEvidence:
    error = RankException(kind, message, f"{kind}: {message}", 0.0)
    return ended(rank, at=at, exception=error, exception_at=at)


def condemned(rank: int, at: float = 1.0) -> RankEvidence:
    verdict = Verdict(0, rank, 40 + rank, "subsequent", 60.0, 60.1, False, 3, {}, "no heartbeat", "", [], {}, True)
    return RankEvidence(rank, rank, 40 + rank, verdict=verdict, verdict_at=at)


KNOWN = Outlook(hangs=False, cause_may_come=False)
CASES = {
    "nothing has failed": ([RankEvidence(0, 0, 40)], Outlook(True, False)),
    "exit": ([ended(0)], KNOWN),
    "signal": ([ended(0, -9)], KNOWN),
    "aborted, perhaps by NCCL's watchdog": ([ended(0, -6)], Outlook(True, False)),
    "own error": ([raised(0, "bad value")], KNOWN),
    "own error of a rank that still runs": ([replace(raised(1, "bad value"), exit_code=None)], Outlook(False, True)),
    "lost a peer": ([raised(0, LOST)], Outlook(False, True, 0)),
    "lost a peer that raised": ([raised(0, LOST), raised(2, "bad value", at=1.1)], KNOWN),
    "waited in a collective": ([raised(0, WAITED)], Outlook(True, True, 0)),
    "a loss that is no number": ([raised(1, "a loss of nan", BAD_LOSS)], KNOWN),
    "condemned": ([condemned(0)], Outlook(True, False)),
    "condemned, and a peer lost it": ([raised(0, LOST, at=1.001), condemned(2)], Outlook(True, False)),
    "lost a peer, and was suspect itself": ([raised(3, LOST)], Outlook(True, True, 3)),
}
"""Rank 1 runs, and rank 3 was about to exceed a limit."""


@pytest.mark.parametrize(("ranks", "seen"), CASES.values(), ids=CASES)
def test_outlook(ranks: list[RankEvidence], seen: Outlook) -> None:
    assert outlook(ranks, running={1}, suspected={3}) == seen
