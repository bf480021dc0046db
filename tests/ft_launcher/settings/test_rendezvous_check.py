"""What becomes of each key of `--rdzv-conf`, by backend."""

from __future__ import annotations

from typing import Any

import pytest

from ft_launcher.settings.rendezvous_check import settle


@pytest.mark.parametrize(
    ("backend", "conf", "kept", "warns"),
    [
        ("c10d", {"join_timeout": "9", "is_host": "1"}, {"join_timeout": "9", "is_host": "1"}, ""),
        ("c10d", {"timeout": "900"}, {"timeout": "900"}, ""),
        ("c10d", {"timeout": '"5"'}, {"timeout": 5}, 'timeout="5" is read as 5'),
        ("c10d", {"timeout": "5s"}, {}, "timeout=5s is left out: it must be a whole number above 0"),
        ("c10d", {"timeout": "0"}, {}, "timeout=0 is left out: it must be a whole number above 0"),
        ("c10d", {'"timeout': '5"'}, {}, "c10d has no such key (did you mean timeout?)"),
        ("c10d", {"joining_timeout": "5"}, {}, "c10d has no such key (did you mean join_timeout?)"),
        ("c10d", {"zzz": "5"}, {}, "zzz=5 is left out: c10d has no such key"),
        ("c10d", {"ca_cert": "/no"}, {}, "c10d does not read it; it is a key of etcd-v2, etcd-v3"),
        ("c10d", {"close_timeout": "7"}, {"close_timeout": "7"}, ""),
        ("c10d", {"rank": 0}, {"rank": 0}, ""),
        ("c10d", {"rank": "first"}, {}, "rank=first is left out: it must be a whole number 0 or above"),
        ("etcd-v3", {"rank": "2"}, {"rank": "2"}, ""),
        ("static", {"rank": 1, "timeout": "5"}, {"rank": 1, "timeout": "5"}, ""),
        ("static", {"join_timeout": "x"}, {}, "join_timeout=x is left out"),
        ("etcd-v2", {"key_prefix": "/a"}, {}, "etcd-v2 does not read it; it is a key of etcd-v3"),
        ("etcd-v2", {"timeout": 900}, {"timeout": 900}, ""),
        ("etcd-v2", {"heartbeat_timeout": "5"}, {"heartbeat_timeout": "5"}, ""),
        ("etcd", {"etcd_prefix": "/a", "timeout": "5"}, {"etcd_prefix": "/a", "timeout": "5"}, ""),
        ("etcd", {"join_timeout": "5"}, {}, "etcd does not read it; it is a key of c10d"),
        ("etcd-v3", {"ttl": "60", "key_prefix": "/a"}, {"ttl": "60", "key_prefix": "/a"}, ""),
        ("of a third party", {"timeout": "soon", "zzz": ""}, {"timeout": "soon", "zzz": ""}, ""),
    ],
)
def test_what_holds(backend: str, conf: dict[str, Any], kept: dict[str, Any], warns: str) -> None:
    settled = settle(backend, conf, several_nodes=True)
    assert settled.conf == kept
    assert [warns in warning for warning in settled.warnings] == [True] * bool(warns)


@pytest.mark.parametrize(
    ("backend", "conf", "says"),
    [
        ("c10d", {"join_timeout": '"5"'}, "join_timeout must be a whole number"),
        ("c10d", {"read_timeout": "0"}, "read_timeout must be above 0"),
        ("c10d", {"store_type": "redis"}, "store_type must be tcp or file"),
        ("c10d", {"heartbeat_timeout": "5"}, "heartbeat_timeout: a beat has no time limit"),
        ("static", {"timeout": "'5'"}, "timeout must be a whole number"),
        ("etcd-v2", {"protocol": "ftp"}, "protocol must be http or https"),
        ("etcd", {"key_prefix": "/a"}, "key_prefix: the backend etcd has etcd_prefix"),
        ("etcd-v3", {"ttl": "soon"}, "ttl must be a whole number"),
    ],
)
def test_what_is_refused(backend: str, conf: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settle(backend, conf, several_nodes=True)


def test_one_node_needs_no_beats() -> None:
    assert settle("c10d", {"heartbeat_timeout": "5"}, several_nodes=False).conf == {"heartbeat_timeout": "5"}
