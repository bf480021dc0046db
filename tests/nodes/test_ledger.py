"""The time ledgers of several nodes as one account: a lost coordinator loses no time, growing is told apart."""

from __future__ import annotations

import math

from ft_launcher.record.journal_reader import Problems, read_journals
from ft_launcher.record.ledger.attempts import account_of
from ft_launcher.tools.report.collection import Collection
from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.spares import Spares
from tests.faults.training import Plan
from tests.ft_launcher.tools.report.lines import collected
from tests.nodes.agents import Agents
from tests.nodes.conftest import StartAgents

HOLD = 4
QUICK = ("--ft-node-timeout=5", "--ft-node-beat=0.5")
ROUNDED = 1e-3


def spares(agents: Agents) -> Spares:
    """What a report on the job says of lost and waiting nodes."""
    collection = Collection()
    for entry in read_journals([agent.journal_folder for agent in agents], Problems()):
        collection.add(entry)
    findings = find(collection)
    assert findings is not None and findings.spares is not None, agents.tail()
    return findings.spares


def test_a_lost_coordinator_loses_no_time(on_nodes: StartAgents) -> None:
    """Its journal ends with it; the spare and the other node tell of the rest."""
    agents = on_nodes(3, Plan(hold=HOLD), "--nnodes=2", "--ft-spares=1", *QUICK, store_apart=True)
    agents.until_train(HOLD, world=4)
    agents.lose(agents.node_of(0))
    agents.until_train(HOLD, world=4, cycle=1)
    agents.go()
    agents.end_well()
    journals = [agent.journal() for agent in agents]
    found = account_of(collected(*journals).times())
    parts = [line for lines in journals for line in lines if line["event"] == "ledger"]
    # A launcher that was killed in its first cycle has no part: its first line says when it began.
    begin = min([*(part["since"] for part in parts), *(lines[0]["t"] for lines in journals)])
    end = max(part["until"] for part in parts)
    assert math.isclose(sum(found.seconds.values()), found.wall_s, abs_tol=ROUNDED), agents.tail()
    assert math.isclose(found.wall_s, end - begin, abs_tol=ROUNDED), agents.tail()
    assert found.seconds["step"] > 0 and found.seconds["custom:waiting"] > 0, agents.tail()
    assert "reschedule" not in found.seconds and found.seconds.get("unknown", 0.0) < found.wall_s / 2, agents.tail()
    assert spares(agents).losses == 1, agents.tail()


def test_growing_is_membership(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, Plan(hold=HOLD), "--nnodes=1:2", *QUICK)
    agents.until_train(HOLD, world=4)
    agents.lose(agents[1])
    agents.until_train(HOLD, world=2, cycle=1)
    agents.back(agents[1])
    agents.until_train(HOLD, world=4, cycle=2)
    agents.go()
    agents.end_well()
    shrunk, grown = (line for line in agents[0].journal("ledger") if line["cycle"] in (1, 2))
    assert shrunk["recovery"] and not grown["recovery"], agents.tail()
    assert grown["seconds"]["membership"] > 0 and "membership" not in agents[0].journal("ledger")[0]["seconds"]
    missed = spares(agents)
    assert (missed.losses, missed.by_spare) == (1, 0), agents.tail()
    assert missed.back_s and missed.saved_rank_s >= 2 * shrunk["seconds"]["step"], agents.tail()
