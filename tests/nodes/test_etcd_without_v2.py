"""An etcd whose v2 API is off, as all are from 3.6 on, behind a backend that speaks nothing else."""

from __future__ import annotations

import pytest

from tests.etcd_server import running_etcd
from tests.faults.training import Plan
from tests.nodes.conftest import StartAgents

RENDEZVOUS_FAILED = 81


@pytest.mark.parametrize("backend", ["etcd-v2", pytest.param("etcd", marks=pytest.mark.slow)])
def test_it_is_said_at_once_and_what_to_use(on_loopback: StartAgents, backend: str) -> None:
    with running_etcd({"enable-v2": "false"}) as etcd:
        endpoint = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-conf=last_call_timeout=1")
        agents = on_loopback(1, Plan(), "--nnodes=2", *endpoint)
        agents.end(RENDEZVOUS_FAILED)
    (reason,) = (line["reason"] for line in agents[0].journal("job_end"))
    assert "has no v2 API of etcd" in reason and "use --rdzv-backend=etcd-v3" in reason
    assert agents[0].output.count("etcd-v3") == 1, agents.tail()
