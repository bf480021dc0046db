"""Checks the rendezvous and the members that a job asks for, before anything starts. Connects to nothing.

Called for a command line by `job_settings.py`, for `launch()` by `python_api.py`. Uses the table of torch's registry of
rendezvous backends, by its underscored name.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ft_launcher.settings.command_line import Parsed
from ft_launcher.settings.rendezvous_keys import BACKENDS, Settled, settle
from rank_monitor.contract.errors import ConfigError, nearest
from rank_monitor.contract.settings.config import MemberSettings

_PACKAGES = {"etcd": ("python-etcd", "etcd"), "etcd-v2": ("python-etcd", "etcd"), "etcd-v3": ("etcd3gw", "etcd3gw")}
_FILES = ("ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert")


def check_rendezvous(config: Any, conf: Mapping[str, Any], parsed: Parsed) -> Settled:
    """Checks the rendezvous of a configuration of torch. Returns the keys of `conf`, the backend's own, that apply.

    Raises:
        ConfigError: it cannot work.
    """
    backend, known = config.rdzv_backend, {*rendezvous_handler_registry._registry, *BACKENDS}
    if backend not in known:
        hint = f"There are {', '.join(sorted(known))}"
        raise parsed.error("rdzv_backend", f"is not a rendezvous backend{nearest(backend, known)}", hint)
    package, module = _PACKAGES.get(backend, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise parsed.error("rdzv_backend", f"needs the package {package}", "pip install 'ft-launcher[etcd]'")
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
            _check_files(settled.conf)
            RendezvousParameters(backend, "", "", 1, 1, **settled.conf).get_as_bool("is_host")
    return settled


def is_file_store(conf: Mapping[str, Any]) -> bool:
    """Whether the endpoint is the path of a file that c10d keeps its store in."""
    return str(conf.get("store_type", "tcp")).strip().lower() == "file"


def _check_reserved(conf: Mapping[str, Any]) -> None:
    doubled = set(conf) & set(inspect.signature(RendezvousParameters).parameters)
    if doubled:
        raise ValueError(f"{', '.join(sorted(doubled))}: there is an option of its own for that")


def _check_files(conf: Mapping[str, Any]) -> None:
    missing = [f"{key}={conf[key]}" for key in _FILES if key in conf and not Path(conf[key]).is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no such file")


def check_members(config: Any, members: MemberSettings, sources: Mapping[str, str]) -> None:
    """Checks our settings of nodes against torch's.

    Raises:
        ConfigError: there is no room for the spares, or the nodes make no whole segments.
    """
    if members.spares and config.rdzv_backend == "static":
        problem = "a static rendezvous has no room for spares: each node rank belongs to one node"
        raise ConfigError("spares", members.spares, sources.get("spares", "settings"), problem, "Use c10d or etcd-v3")
    if members.segment and config.min_nodes % members.segment:
        problem = f"the minimum of nodes, {config.min_nodes}, is not a multiple of it"
        raise ConfigError("segment", members.segment, sources.get("segment", "settings"), problem, "Change --nnodes")
