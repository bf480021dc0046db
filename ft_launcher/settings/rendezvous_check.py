"""Checks the rendezvous and the members that a job asks for, before anything starts. Connects to nothing.

`job_settings.py` calls it for a command line, `python_api.py` for `launch()`. A typing error in `--rdzv-conf` otherwise
shows after minutes, as a timeout on every node.

What becomes of a key of `--rdzv-conf` (`settle`):
- A value that torch itself would refuse is an error.
- A key that cannot have its effect here is an error, with the reason.
- A key that nothing reads is left out, with a warning: torch ignores it in silence.
- A key that only our rendezvous reads is kept, and a wrong value of it is a warning.

An option that the chosen backend never looks at gets a warning, too (`about_unused`).

Uses the table of torch's registry of rendezvous backends, by its underscored name.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from ft_launcher.settings import options
from ft_launcher.settings.command_line import Parsed
from ft_launcher.settings.sources import DEFAULT, Resolved
from rank_monitor.contract.errors import ConfigError, nearest, one_line
from rank_monitor.contract.settings.config import MemberSettings

_EXTRA = "pip install 'ft-launcher[etcd]'"
"""How to install what `etcd-v3` needs."""
_OF_TORCH = "pip install python-etcd; etcd 3.6 and later need --rdzv-backend=etcd-v3 in its place"
_PACKAGES = {
    "etcd": ("python-etcd", "etcd", _OF_TORCH),
    "etcd-v2": ("python-etcd", "etcd", _OF_TORCH),
    "etcd-v3": ("etcd3gw", "etcd3gw", _EXTRA),
}
"""Backend -> the package that it needs, the module that is imported of it, and what to do where it is missing."""
_FILES = ("ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert")
"""Keys whose values are files."""

RANK = "rank"
"""The key by which torch hands `--node-rank` to its static rendezvous. Ours sorts nodes by it with other backends,
too."""
# Keys that several backends read: times of the formation, keep-alives, encryption, and records in etcd.
_FORMATION = frozenset({"join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"})
_BEATS = frozenset({"keep_alive_interval", "keep_alive_max_attempt"})
_TLS = frozenset({"protocol", "ssl_cert", "ssl_cert_key", "ca_cert"})
_RECORDS = frozenset({"key_prefix", "etcd_prefix", "ttl"})
_READ_BY_BACKEND: Mapping[str, frozenset[str]] = {
    "c10d": _FORMATION | _BEATS | {"read_timeout", "is_host", "store_type"},
    "static": frozenset({"timeout", RANK}),
    "etcd-v2": _FORMATION | _BEATS | _TLS | {"read_timeout"},
    "etcd": frozenset({"timeout", "last_call_timeout", "etcd_prefix", "protocol", "cert", "key", "cacert"}),
    "etcd-v3": _FORMATION | _BEATS | _TLS | _RECORDS | {"timeout", "read_timeout"},
}
"""Backend -> the keys that torch's handler or store of that name looks up; `etcd-v3` is our own."""
_READ_HERE_TOO: Mapping[str, frozenset[str]] = {
    "c10d": frozenset({"timeout", RANK}),
    "static": _FORMATION | _BEATS,
    # torch's `LaunchConfig` puts it into each configuration.
    "etcd-v2": frozenset({"timeout"}),
    "etcd-v3": frozenset({RANK}),
}
"""Backend -> the keys that the rendezvous of this package reads in addition (docs/nodes.md). torch's `LaunchConfig`
puts `timeout` into each configuration, also for `etcd-v2`."""
BACKENDS = tuple(_READ_BY_BACKEND)
"""The backends that are known here: those of torch, and one of our own."""

_STATIC = "static"
_WITH_COORDINATOR = frozenset(BACKENDS) - {"etcd", "etcd-v2"}
"""Backends over which our protocol runs. The other two are torch's handlers as they are."""
_SECONDS_OR_COUNTS = _FORMATION | _BEATS | {"timeout", "read_timeout", "ttl"}
"""Keys whose values are whole numbers."""
_CHOICES = {"store_type": ("tcp", "file"), "protocol": ("http", "https")}
"""Key -> its values."""


@dataclass(frozen=True)
class Settled:
    """The keys of `--rdzv-conf` that apply, and warnings about the others."""

    conf: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def check_rendezvous(config: LaunchConfig, conf: Mapping[str, Any], parsed: Parsed) -> Settled:
    """Checks the rendezvous of a configuration of torch.

    Args:
        config: the configuration.
        conf: the keys that the user gave.
        parsed: names option and source in errors.

    Returns:
        The keys of `conf` that apply to the backend, and warnings about the others.

    Raises:
        ConfigError: the rendezvous cannot work.
    """
    backend, known = config.rdzv_backend, {*rendezvous_handler_registry._registry, *BACKENDS}
    if backend not in known:
        hint = f"There are {', '.join(sorted(known))}"
        raise parsed.error("rdzv_backend", f"is not a rendezvous backend{nearest(backend, known)}", hint)
    if backend in _PACKAGES:
        package, module, remedy = _PACKAGES[backend]
        try:
            importlib.import_module(module)
        except ImportError as error:
            problem = f"needs the package {package}, which cannot be imported: {one_line(error)}"
            raise parsed.error("rdzv_backend", problem, remedy) from None
    if backend in BACKENDS and not is_file_store(conf):
        endpoints = [config.rdzv_endpoint]
        if backend == "etcd-v3":
            endpoints = config.rdzv_endpoint.split(",")
        with parsed.errors_of("rdzv_endpoint"):
            for endpoint in endpoints:
                parse_rendezvous_endpoint(endpoint, default_port=-1)
    with parsed.errors_of("rdzv_conf"):
        _check_reserved(conf)
        settled = settle(backend, conf, several_nodes=config.max_nodes > 1)
        if backend in BACKENDS:
            _check_files(backend, settled.conf)
            RendezvousParameters(backend, "", "", 1, 1, **settled.conf).get_as_bool("is_host")
    return settled


def is_file_store(conf: Mapping[str, Any]) -> bool:
    """Whether c10d keeps its store in a file, whose path is the endpoint."""
    return str(conf.get("store_type", "tcp")).strip().lower() == "file"


def _check_reserved(conf: Mapping[str, Any]) -> None:
    """Refuses keys for which there is an option of their own.

    Raises:
        ValueError: there is such a key.
    """
    doubled = set(conf) & set(inspect.signature(RendezvousParameters).parameters)
    if doubled:
        raise ValueError(f"{', '.join(sorted(doubled))}: there is an option of its own for that")


def _check_files(backend: str, conf: Mapping[str, Any]) -> None:
    """Checks that the files in `conf` can be read.

    Raises:
        ValueError: one of them cannot be read, or a key file has no certificate.
    """
    missing = [f"{key}={conf[key]}" for key in _FILES if key in conf and not Path(conf[key]).is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no such file")
    unreadable = [f"{key}={conf[key]}" for key in _FILES if key in conf and not os.access(conf[key], os.R_OK)]
    if unreadable:
        raise ValueError(f"{', '.join(unreadable)}: cannot be read")
    if backend == "etcd-v3" and "ssl_cert_key" in conf and "ssl_cert" not in conf:
        raise ValueError("ssl_cert_key needs ssl_cert")


def sorts_nodes(backend: str) -> bool:
    """Whether `--node-rank` sorts the nodes with this backend, at their first formation or for the whole job."""
    return backend in _WITH_COORDINATOR


def check_members(config: LaunchConfig, members: MemberSettings, sources: Mapping[str, str]) -> None:
    """Checks our settings about nodes against torch's.

    Raises:
        ConfigError: there is no room for the spares, or the nodes make no whole segments.
    """
    if members.spares and config.rdzv_backend == "static":
        problem = "a static rendezvous has no room for spares: each node rank belongs to one node"
        raise ConfigError("spares", members.spares, sources.get("spares", "settings"), problem, "Use c10d or etcd-v3")
    if members.segment and config.min_nodes % members.segment:
        problem = f"the minimum of nodes, {config.min_nodes}, is not a multiple of it"
        raise ConfigError("segment", members.segment, sources.get("segment", "settings"), problem, "Change --nnodes")


def about_unused(config: LaunchConfig, parsed: Parsed, resolved: Resolved) -> list[str]:
    """Returns a warning about each option of the user that the rendezvous never looks at.

    Args:
        config: torch's, as it is launched.
        parsed: tells which options of torch the user gave.
        resolved: our settings, with the source of each.
    """
    backend = config.rdzv_backend
    unused = {"--" + dest.replace("_", "-"): reason for dest, reason in _unused_of_torch(config, parsed).items()}
    if backend not in _WITH_COORDINATOR and config.max_nodes > 1:
        keys = [field.name for field in fields(MemberSettings) if resolved.sources[field.name] != DEFAULT]
        if resolved.settings.restart.restart_policy == "min-healthy":
            keys.append("restart_policy")
        reason = "its own handler forms the groups of nodes, and each node decides for itself"
        unused |= {options.flag_of(key): reason for key in keys}
    return [f"{flag} has no effect with the rendezvous backend {backend}: {reason}" for flag, reason in unused.items()]


def _unused_of_torch(config: LaunchConfig, parsed: Parsed) -> dict[str, str]:
    """Returns option -> why it has no effect, for options of torch that the user gave, by their names in the
    namespace."""
    backend, is_alone = config.rdzv_backend, config.max_nodes == 1
    found = {}
    if backend != _STATIC:
        reason = "the ranks' store gets an address and a free port in each cycle; it counts with the backend static"
        found = {"master_addr": reason, "master_port": reason}
    elif parsed.is_from_user("rdzv_endpoint") and parsed.namespace.rdzv_endpoint:
        reason = "--rdzv-endpoint says where the first node is"
        found = {"master_addr": reason, "master_port": reason}
    # Scripts give 0 to a node that is alone, or first, whatever the backend is: no warning for that.
    if backend != _STATIC and getattr(parsed.namespace, "node_rank", 0) != 0:
        if is_alone:
            found["node_rank"] = "the job has one node"
        elif backend not in _WITH_COORDINATOR:
            found["node_rank"] = "its own handler gives nodes their ranks"
    return {dest: reason for dest, reason in found.items() if parsed.is_from_user(dest)}


def settle(backend: str, conf: Mapping[str, Any], several_nodes: bool) -> Settled:
    """Returns which of the given keys apply to a backend; the module's text says how. A backend that torch does not
    ship gets all keys unchanged.

    Args:
        several_nodes: whether the job has more than one node. A node that is alone needs no rendezvous, unless it is in
            etcd.

    Raises:
        ValueError: a value is wrong, or a key cannot do what it says.
    """
    if backend not in BACKENDS:
        return Settled(dict(conf))
    by_backend = _READ_BY_BACKEND[backend]
    here = by_backend | _READ_HERE_TOO.get(backend, frozenset())
    kept: dict[str, Any] = {}
    warnings = []
    for key, value in conf.items():
        reason = _refusal(backend, key)
        if reason and (several_nodes or key != "heartbeat_timeout"):
            raise ValueError(f"{key}: {reason}")
        if key not in here:
            warnings.append(f"{key}={value} is left out: {_unread(backend, key, here)}")
        elif key in by_backend:
            kept[key] = value
            _check(key, value)
        else:
            kept[key], problem = _tolerated(key, value)
            if problem:
                warnings.append(f"{key}={value} {problem}")
            if kept[key] is None:
                del kept[key]
    return Settled(kept, tuple(f"--rdzv-conf: {warning}" for warning in warnings))


def _refusal(backend: str, key: str) -> str:
    """Returns why a key on which a user may rely cannot have its effect; empty for any other key."""
    if key == "heartbeat_timeout" and backend in _WITH_COORDINATOR:
        return "a beat has no time limit of its own here; a node is lost when it is silent for --ft-node-timeout"
    if backend == "etcd" and key in ("key_prefix", "ttl"):
        return "the backend etcd has etcd_prefix, and no other key for its records; etcd-v3 has both"
    return ""


def _unread(backend: str, key: str, here: frozenset[str]) -> str:
    """Returns why a key is left out: which other backends read it, or which key may have been meant."""
    owners = [other for other in BACKENDS if key in _READ_BY_BACKEND[other] or key in _READ_HERE_TOO.get(other, ())]
    if owners:
        return f"{backend} does not read it; it is a key of {', '.join(owners)}"
    return f"{backend} has no such key{nearest(_bare(key), here)}"


def _check(key: str, value: Any) -> None:
    """Checks a value that torch or the backend will read.

    Raises:
        ValueError: it would be refused.
    """
    if key in _SECONDS_OR_COUNTS:
        number = _whole(value)
        if number is None:
            raise ValueError(f"{key} must be a whole number")
        if number <= 0:
            raise ValueError(f"{key} must be above 0")
    if key in _CHOICES and str(value).strip().lower() not in _CHOICES[key]:
        raise ValueError(f"{key} must be {' or '.join(_CHOICES[key])}")


def _tolerated(key: str, value: Any) -> tuple[Any, str]:
    """Returns the value of a key that only our rendezvous reads, and what is wrong with it; the value is None where it
    is invalid."""
    if key == RANK:
        least, allowed = 0, "0 or above"
    elif key in _SECONDS_OR_COUNTS:
        least, allowed = 1, "above 0"
    else:
        return value, ""
    number = _whole(value)
    if number is not None and number >= least:
        return value, ""
    bare = _whole(_bare(str(value)))
    if bare is not None and bare >= least:
        return bare, f"is read as {bare}"
    return None, f"is left out: it must be a whole number {allowed}"


def _bare(text: str) -> str:
    """Removes quotes that a shell, YAML or a template has left around a text."""
    return text.strip("\"' ")


def _whole(value: Any) -> int | None:
    """Returns the number that torch would read; None: it would read none."""
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        return None
