"""Runs a program where names are looked up slowly: `slow_resolver.py WORDS`, in namespaces of its own.

`slow.test` is 127.0.0.1 after 3 s, within the 5 s that glibc waits; who has an address is never answered.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ANSWERS_S = 3.0
_ADDRESS, _POINTER = 1, 12  # types of records


def serve(server: socket.socket) -> None:
    while True:
        query, asker = server.recvfrom(4096)
        name_end = query.index(b"\0", 12) + 1
        kind = int.from_bytes(query[name_end : name_end + 2], "big")
        if kind == _POINTER:
            continue
        question = query[12 : name_end + 4]
        record = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton("127.0.0.1")
        found = kind == _ADDRESS and b"\4slow\4test" in question
        head = query[:2] + b"\x81\x80\0\1" + (b"\0\1" if found else b"\0\0") + b"\0\0\0\0"
        answer = head + question + (record if found else b"")
        threading.Timer(ANSWERS_S, server.sendto, (answer, asker)).start()


def main(words: list[str]) -> int:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "resolv.conf")
        file.write_text("nameserver 127.0.0.1\n")
        subprocess.run(["mount", "--bind", str(file), "/etc/resolv.conf"], check=True)
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    return subprocess.run(words, env=environ, check=False).returncode


if __name__ == "__main__":
    started = time.monotonic()
    code = main(sys.argv[1:])
    print(f"took {time.monotonic() - started:.1f} s", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)
