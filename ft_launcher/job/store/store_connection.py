"""Opens the job's store for each backend: connects to its server, or starts the server where this node is the host.

`rendezvous/backends.py` passes `open_job_store` to the handler, which calls it at the first formation, in a thread that
a signal leaves behind. What the store contains is not known here. Uses torch's underscored `_matches_machine_hostname`.

    c10d       torch's TCPStore. This node hosts it if the endpoint is its own name, or `is_host` says so. Among several
               launchers of one host the first one has the port, and the others connect.
               With `store_type` other than tcp: files in a folder (`file_store.py`), which no node hosts.
    static     torch's TCPStore at `--master-addr` and `--master-port`, on the node of rank 0.
    etcd-v3    `etcd.py`; no node of the job hosts it.

torch's own way has waits without an end, or of minutes: a server that accepts a connection and says nothing, a port
that another program has, a host that starts a minute later. Here each step has a deadline, and each failure is an error
of one line that names the endpoint.

Threads: `ft_connect` makes one connection of torch's, and is left behind where torch does not return in time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend as create_c10d
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from ft_launcher.job.store.file_store import FolderStore
from ft_launcher.job.store.job_store import HOSTED, Connect, JobStore
from rank_monitor.contract.errors import one_line
from rank_monitor.contract.processes import resolver, runtime_folder
from rank_monitor.contract.processes.making_store import MAX_STAY_S, making_store
from rank_monitor.contract.rounds.barrier import Store

_T = TypeVar("_T")

# All in seconds. The default of c10d's `read_timeout` in torch.
_OPERATION_S = 60
# One plain TCP connection, which is refused or made at once unless packets are dropped.
_REACH_S = 5.0
# A whole connection of torch's store; without a limit of ours, torch waits for ever for a server that never answers.
_CONNECT_S = 20.0
# Between two attempts to reach a host that has not started yet; torch's own pause is up to half a minute.
_RETRY_S = 0.05
# A store answers well within this; after it, `_must_be_a_store` asks whether another program has the port.
_CHECK_AFTER_S = 2.0
# torch's limit for that question: its first answer decides, and a program that is silent gives none.
_FIRST_ANSWER_S = 1.0
_WRONG_FIRST_ANSWER = "Ping failed"
"""torch's error where the first answer of a server is not that of a store."""


def open_job_store(
    backend: str, parameters: RendezvousParameters, check: Callable[[bool], None] = lambda may_host: None
) -> JobStore:
    """Connects to the job's store, and starts its server where this node is the host. Blocks.

    Args:
        backend: c10d, static or etcd-v3.
        parameters: as torch's registry passes them to a handler, with all of that backend's keys.
        check: called before any wait; its argument is whether this node may be the host. Raises an error to refuse: a
            host needs two descriptors for each node.

    Returns:
        The first connection, which makes others.

    Raises:
        RendezvousConnectionError: the store cannot be reached.
    """
    run_id = parameters.run_id
    if backend == "etcd-v3":
        check(False)
        from ft_launcher.job.store.etcd import create_backend as create_etcd_v3

        return _job_store(partial(create_etcd_v3, parameters), run_id)
    if backend == "c10d" and parameters.get("store_type", "tcp").strip().lower() != "tcp":
        check(True)
        if parameters.endpoint:
            folder = Path(f"{parameters.endpoint}.d")
        else:
            folder, _ = runtime_folder.make()
        return _job_store(lambda: _with_record(FolderStore(folder), run_id), run_id)
    may_host, limit_s = _may_host(backend, parameters)
    check(may_host)
    if not may_host:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
        _await_listener(host, port, limit_s)
    if backend == "static":
        store = _static_store(parameters)
        holder = C10dRendezvousBackend(store, run_id)
    else:
        holder, store = _c10d_store(parameters)
    host, port = store.host, store.port
    hosts = may_host and _listens(port)
    if hosts:
        store.set(HOSTED, run_id)
    return JobStore(holder, store, lambda: _with_record(_connect(host, port), run_id), run_id, hosted_here=hosts)


def _job_store(connect: Connect, run_id: str) -> JobStore:
    """Returns the first connection to a store that no node hosts."""
    return JobStore(*connect(), connect, run_id, hosted_here=False)


def _with_record(store: Store, run_id: str) -> tuple[RendezvousBackend, Store]:
    """Returns the store and torch's backend over it, which has the job's record."""
    return C10dRendezvousBackend(store, run_id), store


def _may_host(backend: str, parameters: RendezvousParameters) -> tuple[bool, float]:
    """Returns whether this node hosts the store, or may; and how many seconds to wait for the host otherwise."""
    if not parameters.endpoint:
        return True, 0.0
    if backend == "static":
        return int(parameters.config["rank"]) == 0, float(parameters.get_as_int("timeout", 600) or 600)
    host, _ = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    is_host = parameters.get_as_bool("is_host")
    if is_host is None:
        is_host = _matches_machine_hostname(host)
    return is_host, float(parameters.get_as_int("read_timeout", _OPERATION_S) or _OPERATION_S)


def _c10d_store(parameters: RendezvousParameters) -> tuple[RendezvousBackend, Store]:
    """Has torch make backend and store for c10d; torch also starts the server where this node is the host.

    Raises:
        RendezvousConnectionError: the store cannot be reached; in one line, with the endpoint.
    """
    limit_s = (parameters.get_as_int("read_timeout", _OPERATION_S) or _OPERATION_S) + _REACH_S
    try:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
        made: tuple[RendezvousBackend, Store] = _within(
            limit_s, lambda: create_c10d(parameters), host, port, check=True
        )
        return made
    except RendezvousConnectionError as error:
        if error.__cause__ is None:
            raise
        raise RendezvousConnectionError(_about(parameters.endpoint, error.__cause__)) from error


def _static_store(parameters: RendezvousParameters) -> TCPStore:
    """Makes the store of the static backend; starts its server on the node of rank 0.

    Raises:
        RendezvousConnectionError: the store cannot be reached; in one line, with the endpoint.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    first = int(parameters.config["rank"]) == 0
    limit_s = parameters.get_as_int("timeout", 600) or 600
    try:
        return _tcp_store(host, port, limit_s, min(limit_s, _OPERATION_S) + _REACH_S, hosts=first, check=True)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(_about(f"{host}:{port}", error)) from error


def _must_be_a_store(host: str, port: int) -> None:
    """Checks by the first answer of a server that it speaks the protocol of torch's store.

    torch itself tries again for a minute, and then reports that time is up, whatever has the port.

    Raises:
        RendezvousConnectionError: it speaks another. No server, or one that has not answered yet, is not an error.
    """
    try:
        socket.create_connection((host, port), _REACH_S).close()
        _tcp_store(host, port, _FIRST_ANSWER_S, 2 * _FIRST_ANSWER_S)
    except (OSError, ValueError, RuntimeError, RendezvousConnectionError) as error:
        if _WRONG_FIRST_ANSWER in str(error):
            raise RendezvousConnectionError(_about(f"{host}:{port}", error)) from None


def _about(endpoint: str, error: BaseException) -> str:
    """Says in one line what is wrong with the store at an endpoint."""
    if _WRONG_FIRST_ANSWER in str(error):
        return f"what answers at {endpoint} is not a store of torch's: another program has that port"
    return f"no store at {endpoint}: {one_line(error)}"


def _connect(host: str, port: int) -> TCPStore:
    """Makes a new connection to a store that this node was connected to before.

    A plain connection is made first: where nothing listens, that fails at once, and without a C++ trace. It also finds
    the address, so that a slow resolver is asked for the name only once.

    Raises:
        OSError: nothing listens there.
        RendezvousConnectionError: the server did not answer in time.
    """
    with resolver.usual(), socket.create_connection((host, port), _REACH_S) as plain:
        address = plain.getpeername()[0]
    store = _tcp_store(address, port, _CONNECT_S, _CONNECT_S)
    store.set_timeout(timedelta(seconds=_OPERATION_S))
    return store


def _tcp_store(
    host: str, port: int, timeout_s: float, limit_s: float, hosts: bool = False, check: bool = False
) -> TCPStore:
    """Makes torch's store.

    Args:
        host: of the server.
        port: of the server.
        timeout_s: torch's timeout of the store, for the connection and for each operation.
        limit_s: as for `_within`.
        hosts: whether to start the server.
        check: as for `_within`.
    """
    limit = timedelta(seconds=timeout_s)
    return _within(
        limit_s,
        lambda: TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=limit, multi_tenant=True),
        host,
        port,
        check,
    )


def _within(limit_s: float, make: Callable[[], _T], host: str, port: int, check: bool = False) -> _T:
    """Returns the result of `make`, which runs in a thread: torch has no time limit for a server's first answer.

    Args:
        limit_s: for how many seconds to wait; the thread is left behind then.
        make: connects to a store.
        host: of the server, for errors and for the resolver.
        port: of the server.
        check: if `make` takes longer than 2 s, the server at the port must be a store.

    Raises:
        RendezvousConnectionError: the server did not answer within `limit_s` seconds.
    """
    made: Future[_T] = Future()

    def connect() -> None:
        try:
            # torch looks up both names, to see whether this is the host.
            with resolver.bounded_towards(host, socket.gethostname()), making_store(min(MAX_STAY_S, limit_s / 4)):
                made.set_result(make())
        except BaseException as error:  # handed to the caller's thread
            made.set_exception(error)

    threading.Thread(target=connect, daemon=True, name="ft_connect").start()
    if check and not wait([made], min(_CHECK_AFTER_S, limit_s)).done:
        _must_be_a_store(host, port)
    if not wait([made], limit_s).done:
        problem = f"{host}:{port} accepts connections and says nothing for {limit_s:g} s: no store of torch's?"
        raise RendezvousConnectionError(problem)
    return made.result()


def _await_listener(host: str, port: int, limit_s: float) -> None:
    """Waits until a server listens: the host of the store may start later than this node.

    torch itself pauses for half a minute after the first refusals.

    Raises:
        RendezvousConnectionError: none listens within `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((host, port), _REACH_S).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"nobody answers at {host}:{port} ({error.strerror or error})"
                ) from None
            time.sleep(_RETRY_S)


def _listens(port: int) -> bool:
    """Whether this process is the server at the port: of several launchers that may host it, one is."""
    import psutil  # here: it takes 20 ms, and a job of one node has no such server

    own = psutil.Process(os.getpid())
    if hasattr(own, "net_connections"):
        connections = own.net_connections("tcp")
    else:
        connections = own.connections("tcp")
    return any(entry.status == psutil.CONN_LISTEN and entry.laddr.port == port for entry in connections)
