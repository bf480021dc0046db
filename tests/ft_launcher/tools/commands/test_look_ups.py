"""Look-ups that restarts would wait for: what is said of them."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.nodes import deaf_resolver
from tests.nodes.conftest import require
from tests.nodes.netns import unavailable
from tests.program import run

NAMES = f"127.0.0.1 localhost {socket.gethostname()}\n"
PEER, OWN = "the name of ::ffff:127.0.0.1 took more than 2 s", f"the address of this host's name {socket.gethostname()}"


@pytest.mark.parametrize(
    ("hosts", "variables", "said", "unsaid"),
    [
        ("127.0.0.1 localhost\n", (), (PEER, OWN), ()),
        ("127.0.0.1 localhost\n", ("GLOO_SOCKET_IFNAME=lo",), (PEER,), (OWN,)),
        (NAMES, (), (PEER,), (OWN,)),
        (NAMES + "::ffff:127.0.0.1 localhost\n", (), (), (PEER, OWN)),
    ],
    ids=["none is known", "an interface is given", "the host's name is known", "both are known"],
)
def test_validate_names_slow_look_ups_and_what_ends_them(
    hosts: str, variables: tuple[str, ...], said: tuple[str, ...], unsaid: tuple[str, ...], tmp_path: Path
) -> None:
    require(unavailable())
    within = ["unshare", "--net", "--mount", sys.executable, str(deaf_resolver.__file__), "queries", hosts]
    words = [*within, "env", *variables, sys.executable, "-m", "ft_launcher", "validate"]
    done = run(words, folder=tmp_path, limit_s=60, check=True)
    assert [text for text in (*said, *unsaid) if text in done.stderr] == list(said)
