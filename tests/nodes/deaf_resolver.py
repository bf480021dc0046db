"""Runs a program on a host with a resolver of its own: `deaf_resolver.py QUERIES HOSTS WORDS`, in new namespaces.

`node.test` is 127.0.0.1 at once; nothing else is ever answered. Each question is a line of the file QUERIES: the name
that was looked up. HOSTS is the text of /etc/hosts. Without a resolver, with `-` for QUERIES, nobody can be asked.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ADDRESS = "127.0.0.53"
KNOWN = "node.test"
NOBODY = "-"
_HOST_ADDRESS = 1  # type of a record


def name_of(query: bytes) -> tuple[str, int]:
    """Returns the name that a query asks for, and where it ends."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    return ".".join(labels), at + 1


def serve(server: socket.socket, queries: Path) -> None:
    while True:
        query, asker = server.recvfrom(4096)
        name, end = name_of(query)
        with queries.open("a") as lines:
            lines.write(f"{name}\n")
        if name != KNOWN:
            continue
        is_address = int.from_bytes(query[end : end + 2], "big") == _HOST_ADDRESS
        head = query[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_address else b"\0\0") + b"\0\0\0\0"
        record = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton("127.0.0.1")
        server.sendto(head + query[12 : end + 4] + (record if is_address else b""), asker)


def main(queries: str, hosts: str, words: list[str]) -> int:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    resolvers = ""
    if queries != NOBODY:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind((ADDRESS, 53))
        threading.Thread(target=serve, args=(server, Path(queries)), daemon=True).start()
        resolvers = f"nameserver {ADDRESS}\n"
    texts = {"resolv.conf": resolvers, "hosts": hosts, "nsswitch.conf": "hosts: files dns\n"}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            file = Path(folder, name)
            file.write_text(text)
            subprocess.run(["mount", "--bind", str(file), f"/etc/{name}"], check=True)
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    return subprocess.run(words, env=environ, check=False).returncode


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stderr.flush()
    os._exit(code)
