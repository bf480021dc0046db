"""How `etcd-v3` gets at an etcd: endpoints, TLS, what is not an etcd, settings. What answers here is real."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ft_launcher.job.store.etcd import EtcdV3Store, create_backend
from ft_launcher.job.store.etcd_gateway import EtcdRefusal
from rank_monitor.contract.errors import ConfigError
from tests.etcd_server import HOST, EtcdServer, running_etcd
from tests.ports import free_port
from tests.program import python, run


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate (and its key) that signs for itself, for servers and clients on loopback."""
    folder = tmp_path_factory.mktemp("tls")
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test -keyout key -out cert"
    )
    command = ["openssl", *words.split(), "-addext", f"subjectAltName=IP:{HOST}"]
    run(command, folder=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def etcd(authority: Path) -> Iterator[EtcdServer]:
    """A server which at its second port speaks TLS, to clients with a certificate only."""
    cert = str(authority / "cert")
    flags = {"cert-file": cert, "key-file": str(authority / "key"), "trusted-ca-file": cert, "client-cert-auth": "true"}
    with running_etcd(flags) as server:
        yield server


def connect(endpoint: str, run_id: str = "run", **settings: Any) -> EtcdV3Store:
    settings = {"read_timeout": 20, **settings}
    return create_backend(RendezvousParameters("etcd-v3", endpoint, run_id, 1, 2, **settings))[1]


# Endpoints.


@pytest.fixture
def silent() -> Iterator[str]:
    """An endpoint that takes connections and says nothing."""
    with socket.create_server((HOST, 0)) as listener:
        yield f"{HOST}:{listener.getsockname()[1]}"


def test_endpoints_are_tried_in_order(etcd: EtcdServer, silent: str) -> None:
    store = connect(f"{HOST}:{free_port()}, {silent} ,{etcd.endpoint}")
    store.set("key", "1")
    assert connect(f"{etcd.endpoint},{silent}").get("key") == b"1"


def test_every_endpoint_that_fails_is_told(silent: str) -> None:
    closed = f"{HOST}:{free_port()}"
    with pytest.raises(RendezvousConnectionError) as told:
        connect(f"{silent},{closed}", read_timeout=2)
    assert f"http://{silent}: no answer in time; http://{closed}: Connection refused" in str(told.value)
    assert "--rdzv-endpoint" in str(told.value)


# No etcd.


class Shop(BaseHTTPRequestHandler):
    """Answers whatever it is asked with the words of the server."""

    words = b""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.words)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def shop(words: bytes) -> Callable[[], contextlib.AbstractContextManager[str]]:
    return lambda: serving(type("OneShop", (Shop,), {"words": words}))


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"{HOST}:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def tcp_store() -> Iterator[str]:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    yield f"{HOST}:{store.port}"


class Files(SimpleHTTPRequestHandler):
    log_message = Shop.log_message


NO_ETCD = {
    "files": lambda: serving(Files),
    "page": shop(b"<html>Welcome</html>"),
    "empty": shop(b""),
    "object": shop(b"{}"),
    "list": shop(b'["header"]'),
    "number": shop(b"1"),
    "result": shop(b'{"result": 1}'),
    "error": shop(b'{"error": {"message": "no"}}'),
    "bytes": shop(b"\xff\x00"),
    "tcpstore": tcp_store,
}


@pytest.mark.parametrize("kind", NO_ETCD)
def test_what_is_no_etcd_is_told_in_one_message(kind: str) -> None:
    with NO_ETCD[kind]() as endpoint, pytest.raises(RendezvousConnectionError) as told:
        connect(endpoint, read_timeout=2 if kind == "tcpstore" else 20)
    text = str(told.value)
    assert text.startswith(f"no etcd (3.4 or later) can be reached (http://{endpoint}: ")
    assert "\n" not in text and len(text) < 300
    assert kind == "tcpstore" or "answers, but not as etcd does" in text


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"http://no\.such\.host\.invalid:2379: "):
        connect("no.such.host.invalid")


def test_what_etcd_refuses_is_told_in_its_words(etcd: EtcdServer) -> None:
    store = connect(etcd.endpoint)
    with pytest.raises(EtcdRefusal, match=f"etcd at http://{etcd.endpoint} refuses: .*(too large|larger than)"):
        store.set("big", bytes(4 << 20))
    store.set("small", "1")


# TLS.


def test_tls_both_ways(etcd: EtcdServer, authority: Path) -> None:
    files = {"ssl_cert": "cert", "ssl_cert_key": "key", "ca_cert": "cert"}
    settings = {name: str(authority / file) for name, file in files.items()}
    endpoint = f"{HOST}:{etcd.tls_port}"
    store = connect(endpoint, protocol="HTTPS", **settings)
    store.set("key", "1")
    assert store.get("key") == b"1"
    both = authority / "both"
    both.write_text((authority / "cert").read_text() + (authority / "key").read_text())
    assert connect(endpoint, protocol="https", ssl_cert=str(both), ca_cert=settings["ca_cert"]).get("key") == b"1"
    with pytest.raises(RendezvousConnectionError, match="certificate verify failed"):
        connect(endpoint, protocol="https")
    with pytest.raises(RendezvousConnectionError, match=r"certificate|EOF|closed|reset|[Bb]roken"):
        connect(endpoint, protocol="https", ca_cert=settings["ca_cert"])
    with pytest.raises(RendezvousConnectionError, match=r"answers, but not as etcd does|closed|reset"):
        connect(endpoint)


def test_a_job_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="rdzv_id"):
        connect(HOST, run_id="")


def test_it_is_imported_without_the_package() -> None:
    """As everything of ours can be."""
    python("import sys; sys.modules['etcd3gw'] = None; import ft_launcher.job.store.etcd")
