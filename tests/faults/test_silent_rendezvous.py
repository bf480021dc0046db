"""A rendezvous of torch's own whose store stands still: a signal ends the launcher all the same, whatever it asks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.etcd_server import EtcdServer, running_etcd
from tests.faults.conftest import StartJob
from tests.faults.job import Job, kill
from tests.faults.training import Plan

PREEMPTED = 86
LIMIT_S = 20
"""Below the times after which a request of torch's etcd client ends and the launcher leaves by force, 60 s each."""


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


def over(etcd: EtcdServer) -> tuple[str, ...]:
    """The flags of a job of one node that others may join."""
    endpoint = ("--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job")
    return ("--nnodes=1:2", *endpoint, "--rdzv-conf=last_call_timeout=1,timeout=60", "--monitor-interval=0.1")


def has_unread(job: Job, port: int) -> bool:
    """Whether bytes lie at a port that who listens there has not read."""
    lines = [line.split() for line in (job.place.net / "tcp").read_text().splitlines()[1:]]
    return any(
        int(local.rpartition(":")[2], 16) == port and int(queues.rpartition(":")[2], 16) > 0
        for _, local, _, _, queues, *_ in lines
    )


def pause(etcd: EtcdServer, job: Job) -> None:
    """Lets etcd stand still, and waits until it leaves a request unread."""
    etcd.pause()
    job.until(lambda: has_unread(job, etcd.port), "a request that etcd does not read")


def test_it_is_asked_for_new_nodes(start_job: StartJob, etcd: EtcdServer) -> None:
    job = start_job(Plan(hold=1), 1, *over(etcd))
    job.until_ranks_train()
    pause(etcd, job)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(LIMIT_S) == PREEMPTED, job.tail()


def test_it_is_to_form_the_next_cycle(start_job: StartJob, etcd: EtcdServer) -> None:
    """Which waits for the answer to the question before it."""
    job = start_job(Plan(hold=1), 1, *over(etcd), "--max-restarts=1")
    (pid,) = job.until_ranks_train().values()
    pause(etcd, job)
    kill(pid)
    job.until(lambda: job.journal("decision"), "the decision")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(LIMIT_S) == PREEMPTED, job.tail()


def test_its_handler_is_made(start_job: StartJob, etcd: EtcdServer) -> None:
    etcd.pause()
    job = start_job(Plan(hold=1), 1, *over(etcd))
    job.until(lambda: has_unread(job, etcd.port), "a request that etcd does not read")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(LIMIT_S) == 128 + signal.SIGTERM, job.tail()


def test_its_handler_is_shut_down(start_job: StartJob, etcd: EtcdServer) -> None:
    """The training is complete, so the signal is no failure."""
    job = start_job(Plan(hold=1), 1, *over(etcd))
    job.until_ranks_train()
    pause(etcd, job)
    job.go()
    job.until(lambda: job.journal("cycle_end"), "the end of the cycle")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(LIMIT_S) == 0, job.tail()


def test_an_answer_of_a_cycle_that_has_ended_ends_no_other(start_job: StartJob, etcd: EtcdServer) -> None:
    job = start_job(Plan(hold=1), 1, *over(etcd), "--max-restarts=1")
    (pid,) = job.until_ranks_train().values()
    pause(etcd, job)
    kill(pid)
    job.until(lambda: job.journal("decision"), "the decision")
    etcd.resume()
    job.until_ranks_train(cycle=1)
    job.go()
    assert job.finish() == 0, job.tail()
    assert [line["cycle"] for line in job.journal("cycle_start")] == [0, 1], job.tail()
